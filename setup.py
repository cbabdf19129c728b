"""One job: the folder kernels/ installs as flash_qla_tl.kernels. The rest is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["flash_qla_tl", "flash_qla_tl.*"]),
        *(f"flash_qla_tl.{name}" for name in find_packages(include=["kernels", "kernels.*"])),
    ],
    package_dir={"flash_qla_tl.kernels": "kernels"},
)
