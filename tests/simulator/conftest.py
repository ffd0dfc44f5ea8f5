"""The tests in this folder run in Numba's simulator, in a process of their own: tests/test_simulator.py."""

from tests.simulator import fastsim

fastsim.install()
