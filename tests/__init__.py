"""Tests in five layers; design and commands are in README.md."""
