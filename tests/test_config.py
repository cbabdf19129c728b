"""pick_config: pure, and it never picks what the compile tier does not compile."""

import itertools

import pytest

pytest.importorskip("tilelang")

from flash_qla_tl.kernels.common.segments import Lengths, Segments  # noqa: E402
from flash_qla_tl.kernels.gated_delta_rule import chunk_bwd, chunk_fwd, chunk_intra, chunk_states  # noqa: E402
from flash_qla_tl.kernels.kda import fwd, prepare, state_loop  # noqa: E402

SMS = 132


def pick(heads, K=128, V=128, dtype="bfloat16", num_sms=SMS, emit=False, chunks=32, split=False, rows=1, total=None):
    # chunks: of the longest; all of them: nobody knows
    lengths = Lengths(rows, total or rows * chunks, chunks)
    return chunk_fwd.pick_config(K, V, dtype, heads, lengths, num_sms, emit, split)


def pick_bwd(heads, K=128, V=128, dtype="bfloat16", num_sms=SMS, chunks=32, split=False, rows=1, total=None):
    lengths = Lengths(rows, total or rows * chunks, chunks)
    return chunk_states.pick_config(K, V, dtype, heads, lengths, num_sms, split)


def test_every_pick_is_compiled():
    compiled = set(chunk_fwd.configs())
    compiled_bwd = set(chunk_states.configs())
    for heads, K, V, dtype, num_sms, emit in itertools.product(
        [1, 5, 64, 66, 67, 100, 132, 133, 256, 4096],
        (64, 128),
        (64, 128),
        ("bfloat16", "float16"),
        (78, 114, 132),
        (False, True),
    ):
        for chunks, split in itertools.product((0, 1, 8, 100, 10000), (False, True)):
            config, segment = pick(heads, K, V, dtype, num_sms, emit, chunks, split)
            assert config in compiled and segment >= 1
            assert split or segment >= chunks
            config, segment = pick_bwd(heads, K, V, dtype, num_sms, chunks, split)
            assert config in compiled_bwd and segment >= 1
            assert split or segment >= chunks


def test_number_of_variants():
    """A server compiles them all: their number is a promise."""
    numbers = {chunk_fwd: 12, chunk_states: 12, chunk_bwd: 8, prepare: 2, state_loop: 6}
    assert {kernel: len(set(kernel.configs())) for kernel in numbers} == numbers
    # ... and chunk_intra, segment_states and segment_starts for every K and dtype; for every dtype KDA's segment_states and the two
    # directions of activations.
    assert sum(numbers.values()) + 3 * 4 + 3 * 2 <= 60


@pytest.mark.parametrize(
    ("heads", "VR"),
    [
        (1, 64),  # one wave either way: the shorter step
        (66, 64),  # the last count whose halves are one wave
        (67, 128),  # two waves of halves would take longer than one of whole heads
        (132, 128),
        (256, 128),
    ],
)
def test_split_of_a_head(heads, VR):
    assert pick(heads)[0].VR == VR


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (dict(heads=8, chunks=512), 16),  # 8 of 132 SMs busy
        (dict(heads=32, chunks=512), 8),
        (dict(heads=32, chunks=128), 4),
        (dict(heads=64, chunks=128), 1),  # halves of heads fill the card
        (dict(heads=32, chunks=128, rows=4), 1),  # heads fill it
        (dict(heads=32, chunks=8), 1),  # too short to gain
        (dict(heads=8, chunks=512, rows=2, total=512), 19),  # two sequences, nobody knows of what length
        (dict(heads=64, chunks=512, rows=2, total=512), 1),
        (dict(heads=8, chunks=448, rows=2, total=512), 18),  # ... and somebody does
        (dict(heads=32, chunks=40, rows=16, total=512), 1),  # many, no one long
        (dict(heads=32, chunks=512, rows=16, total=512), 1),  # many of them
    ],
)
def test_parts_of_a_sequence(options, parts):
    _, segment = pick(split=True, **options)
    assert -(-options["chunks"] // segment) == parts


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (dict(heads=8, chunks=512), 16),  # two walks of 8 heads
        (dict(heads=8, chunks=128), 8),
        (dict(heads=16, chunks=128), 4),
        (dict(heads=16, chunks=512), 8),
        (dict(heads=32, chunks=512), 1),  # halves of heads, in both directions, fill the card
        (dict(heads=8, chunks=64, rows=8), 1),  # heads fill it
        (dict(heads=8, chunks=16), 1),  # too short to gain
        (dict(heads=8, chunks=512, rows=2, total=512), 19),  # two sequences, nobody knows of what length
        (dict(heads=32, chunks=512, rows=2, total=512), 1),
        (dict(heads=8, chunks=448, rows=2, total=512), 18),  # ... and somebody does
        (dict(heads=32, chunks=512, rows=16, total=512), 1),  # many of them
    ],
)
def test_parts_of_a_sequence_backward(options, parts):
    _, segment = pick_bwd(split=True, **options)
    assert -(-options["chunks"] // segment) == parts


@pytest.mark.parametrize("chunks", [1, 3, 12, 13, 100])
@pytest.mark.parametrize("packed", [False, True])
def test_slots_of_segments(packed, chunks):
    """Every sequence finds its own, and one that is not split is a segment by itself."""
    N, num_tokens = 5, 64 * 12 + 20
    lengths = Lengths.of(N, num_tokens, packed, None, None)
    cut = Segments.of(chunks, lengths, num_tokens, packed)
    assert cut.split == (chunks < 13)
    if not cut.split:
        assert cut[1:] == (N, 14, 1, 0)
    elif packed:
        assert cut.number == num_tokens // (64 * chunks) + N and 1 << cut.search_steps > N
    else:
        assert cut.number == N * cut.per_row and (cut.per_row - 1) * chunks < 13 <= cut.per_row * chunks


def test_registers_fit_the_register_file():
    for config in chunk_fwd.configs():
        producers, state = config.registers
        assert producers % 8 == state % 8 == 0
        assert 128 * (producers + state * config.VR // 64) <= 65536


def test_a_cta_takes_a_group_where_that_fills_the_card():
    assert chunk_intra.heads_per_cta(4, 16, SMS) == 1
    assert chunk_intra.heads_per_cta(4, 4 * chunk_intra.CTAS_PER_SM * SMS, SMS) == 4


def pick_kda(heads, chunks=32, rows=1, longest=None, total=None, num_sms=SMS, dtype="bfloat16", emit=False):
    """chunks: of every sequence. longest, total: where they differ; longest is the total where nobody knows."""
    lengths = Lengths(rows, total or rows * chunks, longest or total or chunks)
    return fwd.pick_config(dtype, heads, lengths, num_sms, emit)


@pytest.mark.parametrize("emit", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kda_picks_are_compiled(dtype, emit):
    compiled = set(state_loop.configs())
    for heads, sms in itertools.product((1, 5, 64, 66, 67, 100, 132, 133, 256, 4096), (78, 114, SMS)):
        for chunks in (0, 1, 8, 100, 10000):
            config, segment = pick_kda(heads, chunks, num_sms=sms, dtype=dtype, emit=emit)
            assert config in compiled and segment >= 1


@pytest.mark.parametrize(
    ("heads", "VR"),
    [
        (1, 64),  # one wave either way: the shorter step
        (66, 64),  # the last count whose halves are one wave
        (67, 128),  # two waves of halves would take longer than one of whole heads
        (132, 128),
        (133, 128),  # three waves of halves, two of whole heads
        (256, 128),
    ],
)
def test_split_of_a_head_of_kda(heads, VR):
    config, segment = pick_kda(heads)
    assert config.VR == VR and segment == 32


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (dict(heads=8, chunks=512), 8),  # 8 of 132 SMs busy
        (dict(heads=16, chunks=512), 5),
        (dict(heads=32, chunks=512), 1),  # memory would be the limit, twice
        (dict(heads=8, chunks=128), 8),
        (dict(heads=32, chunks=128), 1),
        (dict(heads=96, chunks=128), 1),
        (dict(heads=8, chunks=128, rows=8), 1),
        (dict(heads=8, chunks=64), 1),  # too short to gain
        (dict(heads=8, rows=2, total=512), 19),  # two sequences, nobody knows of what length
        (dict(heads=64, rows=2, total=512), 1),
        (dict(heads=8, rows=2, total=512, longest=448), 18),  # ... and somebody does
        (dict(heads=8, rows=16, total=512), 1),  # many, mostly short
        (dict(heads=8, rows=16, total=512, longest=40), 1),
    ],
)
def test_parts_of_a_sequence_of_kda(options, parts):
    _, segment = pick_kda(**options)
    longest = options.get("longest") or options.get("total") or options["chunks"]
    assert -(-longest // segment) == parts
