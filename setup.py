"""Metadata lives in pyproject.toml; this file lets `python setup.py develop`-era tooling find the package."""

from setuptools import setup

setup()
