"""The CUDA C++ sources, installed as data; see README.md in this folder for their conventions."""
