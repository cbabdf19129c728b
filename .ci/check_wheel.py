"""Compare what a wheel holds with what the repository tracks: python .ci/check_wheel.py WHEEL"""

import subprocess
import sys
import zipfile


def expected() -> set[str]:
    """The files of the two source folders, under the names they install as."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run([*command, "flash_qla_tl", "kernels"], check=True, capture_output=True, text=True)
    return {f"flash_qla_tl/{name}" if name.startswith("kernels/") else name for name in listing.stdout.splitlines()}


def main() -> int:
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    wanted = expected()
    for name in sorted(wanted - held):
        print(f"missing from the wheel: {name}")
    for name in sorted(held - wanted):
        print(f"in the wheel, not in the repository: {name}")
    print(f"{sys.argv[1]}: {len(held)} files")
    return int(held != wanted or not held)


if __name__ == "__main__":
    sys.exit(main())
