"""What brings the operators into other packages; each module does nothing until it is called."""
