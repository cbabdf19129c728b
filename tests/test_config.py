"""pick_config: pure, and it never picks what the compile tier does not compile."""

import itertools

import pytest

pytest.importorskip("tilelang")

from flash_qla_tl.kernels.gated_delta_rule import fused_fwd  # noqa: E402

SMS = 132


def pick(heads, K=128, V=128, dtype="bfloat16", num_sms=SMS, emit=False):
    return fused_fwd.pick_config(K, V, dtype, heads, num_sms, emit)


def test_every_pick_is_compiled():
    compiled = set(fused_fwd.configs())
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
    assert len(set(fused_fwd.configs())) == len(fused_fwd.configs()) == 24


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
    for config in fused_fwd.configs():
        producers, aux, state = config.registers
        assert all(r % 8 == 0 for r in config.registers)
        assert 128 * (producers + aux + state * config.VR // 64) <= 65536
