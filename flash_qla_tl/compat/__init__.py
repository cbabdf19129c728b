"""Other packages' functions under the names and arguments that their callers know."""
