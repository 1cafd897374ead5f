"""Time and memory of operators beside PyTorch's own attention.

Layout: `timing` and `memory` measure one call; `operators` lists what can be measured; `ops` measures over lengths;
`record` is what is kept; `show` prints and draws. `states` finds the size of what mixers remember; `peers` measures
other packages, `show_peers` prints that. A further kind of measurement is a module like `ops`, on the same `timing` and
`memory`.
"""

from mercer.bench.memory import peak_bytes
from mercer.bench.operators import BENCHES, DEFAULT_OPERATORS, Operator, Shape
from mercer.bench.ops import PHASES, bench_ops
from mercer.bench.peers import PEERS, Peer, PeersBench, bench_peers
from mercer.bench.record import Measurement, OpsBench, crossover
from mercer.bench.show import DEFAULT_LENGTHS, format_bench, ratio_figure, run_ops
from mercer.bench.show_peers import format_peers, run_peers
from mercer.bench.states import DEFAULT_STATES, StateBench, bench_states, run_states, state_bytes
from mercer.bench.timing import Timing, one_thread, steady_allocator, time_together

__all__ = [
    "BENCHES",
    "DEFAULT_LENGTHS",
    "DEFAULT_OPERATORS",
    "DEFAULT_STATES",
    "PEERS",
    "PHASES",
    "Measurement",
    "Operator",
    "OpsBench",
    "Peer",
    "PeersBench",
    "Shape",
    "StateBench",
    "Timing",
    "bench_ops",
    "bench_peers",
    "bench_states",
    "crossover",
    "format_bench",
    "format_peers",
    "one_thread",
    "peak_bytes",
    "ratio_figure",
    "run_ops",
    "run_peers",
    "run_states",
    "state_bytes",
    "steady_allocator",
    "time_together",
]
