"""pick_config: pure, and it never picks what the compile tier does not compile."""

import itertools

import pytest

pytest.importorskip("tilelang")

from flash_qla_tl.kernels.gated_delta_rule import chunk_bwd, chunk_fwd, chunk_intra, chunk_states  # noqa: E402
from flash_qla_tl.kernels.kda import prepare, state_loop  # noqa: E402

SMS = 132


def pick(heads, K=128, V=128, dtype="bfloat16", num_sms=SMS, emit=False):
    return chunk_fwd.pick_config(K, V, dtype, heads, num_sms, emit)


def test_every_pick_is_compiled():
    compiled = set(chunk_fwd.configs())
    for heads, K, V, dtype, num_sms, emit in itertools.product(
        [1, 5, 64, 66, 67, 100, 132, 133, 256, 4096],
        (64, 128),
        (64, 128),
        ("bfloat16", "float16"),
        (78, 114, 132),
        (False, True),
    ):
        assert pick(heads, K, V, dtype, num_sms, emit) in compiled


def test_number_of_variants():
    """A server compiles them all: their number is a promise."""
    numbers = {chunk_fwd: 20, chunk_states: 12, chunk_bwd: 8, prepare: 2, state_loop: 6}
    assert {kernel: len(set(kernel.configs())) for kernel in numbers} == numbers
    # ... and chunk_intra and the two directions of activations for every head dim and dtype.
    assert sum(numbers.values()) + 3 * 4 <= 60


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
    assert pick(heads).VR == VR


def test_registers_fit_the_register_file():
    for config in chunk_fwd.configs():
        producers, state = config.registers
        assert producers % 8 == state % 8 == 0
        assert 128 * (producers + state * config.VR // 64) <= 65536


def test_a_cta_takes_a_group_where_that_fills_the_card():
    assert chunk_intra.heads_per_cta(4, 16, SMS) == 1
    assert chunk_intra.heads_per_cta(4, 4 * chunk_intra.CTAS_PER_SM * SMS, SMS) == 4


@pytest.mark.parametrize("emit", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kda_picks_are_compiled(dtype, emit):
    compiled = set(state_loop.configs())
    for heads in (1, 5, 64, 66, 67, 100, 132, 133, 256, 4096):
        assert all(state_loop.pick_config(dtype, heads, sms, emit) in compiled for sms in (78, 114, SMS))


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
    assert state_loop.pick_config("bfloat16", heads, SMS, False).VR == VR
