"""What the tests of the benches' harness share: two cases, and a GPU whose calls only move its clock."""

from bench import timing

L2_BYTES = 50_000_000
CASES = [
    {"op": "merge", "rows": 4096, "states": 8, "dtype": "bfloat16"},
    {"op": "merge", "rows": 65536, "states": 2, "dtype": "bfloat16"},
]


class FakeDevice:
    """A GPU whose calls do nothing but move its clock; `log` tells what ran, in order."""

    l2_bytes = L2_BYTES

    def __init__(self):
        self.seconds = 0.0
        self.log = []
        self.capturing = False
        self.replaying = False
        self.graph_sizes = []

    def call(self, name, us, launch_us=0.0, capturable=True):
        """A call of `us` on the GPU (number or function of the time); outside graphs at least `launch_us`."""

        def launch():
            if self.capturing:
                if not capturable:
                    raise timing.CaptureError("RuntimeError: not in a graph")
                return
            self.log.append(name)
            gpu_us = us(self.seconds) if callable(us) else us
            self.seconds += max(gpu_us, 0.0 if self.replaying else launch_us) * 1e-6

        return launch

    def capture(self, calls):
        self.capturing = True
        try:
            for call in calls:
                call()
        finally:
            self.capturing = False
        self.graph_sizes.append(len(calls))

        def replay():
            self.replaying = True
            for call in calls:
                call()
            self.replaying = False

        return replay

    def time_us(self, launches, before=None):
        times = []
        for launch in launches:
            if before is not None:
                before()
            start = self.seconds
            launch()
            times.append((self.seconds - start) * 1e6)
        return times

    def flush(self):
        self.log.append("flush")
        self.seconds += 40e-6

    def synchronize(self):
        self.log.append("sync")

    def now(self):
        return self.seconds

    def copy_call(self, num_bytes):
        return self.call("copy", 500)

    def matmul_call(self, n):
        return self.call("matmul", 1400)

    def describe(self):
        return {"gpu": "Fake", "sms": 132, "driver": "13.0", "runtime": "13.2", "cupy": "14.2.0"}

    def release(self):
        pass
