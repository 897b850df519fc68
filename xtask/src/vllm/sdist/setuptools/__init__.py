"""Stands in for setuptools where a package's sources are fetched and nothing of it is built.

pip asks the build of a source distribution for its metadata before it keeps the file, and vLLM's own build
needs PyTorch to answer.
"""
