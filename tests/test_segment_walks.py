"""Walks in segments, launch by launch in float64: which chunks each CTA takes, from where and to which slots, as the kernels do."""

import pytest
import torch

pytest.importorskip("tilelang")

from flash_qla_tl.affine import Call, affine_pair, affine_pair_bwd  # noqa: E402
from flash_qla_tl.kernels.common.segments import Lengths, Segments  # noqa: E402
from flash_qla_tl.kernels.gated_delta_rule.segment_states import LIMIT  # noqa: E402
from flash_qla_tl.testing import gate, inputs  # noqa: E402
from flash_qla_tl.torch_chunked import chunked, chunked_bwd  # noqa: E402

SCALE = 0.3


def problem(lengths, regime, T=None, normalised=True, HV=2, B=1, K=8, V=4):
    x = inputs(
        B, T or 0, 1, HV, K, V, lengths=lengths, dtype=torch.float64, h0_dtype=torch.float64, normalised=normalised
    )
    rates = {"none": [0.0], "slow": [0.003], "fast": [2.0], "mixed": [0.0, 2.0]}
    tokens = x["v"].shape[:3]
    x["g"] = (
        -torch.rand(tokens).double() * torch.tensor((rates[regime] * HV)[:HV])
        if regime in rates
        else gate(regime, *tokens)
    )
    x = {name: y.double() if y.is_floating_point() else y for name, y in x.items()}
    x["do"], x["dht"] = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
    return x


class Slots(torch.Tensor):
    """A tensor that no index reaches from behind."""

    def __getitem__(self, at):
        self._inside(at)
        return super().__getitem__(at).as_subclass(torch.Tensor)

    def __setitem__(self, at, value):
        self._inside(at)
        super().__setitem__(at, value)

    @staticmethod
    def _inside(at):
        first = at[0] if isinstance(at, tuple) else at
        if isinstance(first, int) and first < 0:
            raise IndexError(at)


def slots(*shape, value=torch.nan):
    return torch.full(shape, value, dtype=torch.float64).as_subclass(Slots)


class Launches:
    """The kernels of a backward that splits, a method each. States are [K, V] here, and every head has its own key."""

    def __init__(self, x, segment_chunks, num_chunks=None, longest=None):
        self.x, self.cu = x, x.get("cu_seqlens")
        self.rows, self.T, self.HV, self.V = x["v"].shape
        self.K = x["k"].shape[3]
        self.N = self.rows if self.cu is None else len(self.cu) - 1
        self.slots_per_row = -(-self.T // 64)
        self.slots = self.rows * self.slots_per_row if self.cu is None else self.T // 64 + self.N
        lengths = Lengths.of(self.N, self.T, self.cu is not None, num_chunks, longest)
        self.cut = Segments.of(segment_chunks, lengths, self.T, self.cu is not None)
        self.chunk_intra()
        if self.cut.split:
            self.segment_states()
            self.segment_starts()
        self.chunk_states()

    def bounds_of(self, n):
        bos = min(max(int(self.cu[n]), 0), self.T)
        return bos, min(max(int(self.cu[n + 1]), bos), self.T)

    def find_segment(self, i_g):
        """walk.find_segment -> the sequence, its segment, its bounds, its first chunk's slot."""
        cut = self.cut
        if self.cu is None:
            i_n, i_s = divmod(i_g, cut.per_row)
            return i_n, i_s, 0, self.T, i_n * self.slots_per_row
        i_n = 0 if cut.search_steps else i_g
        for r in reversed(range(cut.search_steps)):
            later = i_n + (1 << r)
            if later < self.N and self.bounds_of(later)[0] // (64 * cut.chunks) + later <= i_g:
                i_n = later
        bos, eos = self.bounds_of(i_n)
        return i_n, i_g - bos // (64 * cut.chunks) - i_n, bos, eos, bos // 64 + i_n

    def tokens(self, name, i_n, t, i_hv):
        """64 rows from token t on, as TMA brings them: of the next sequence too, and zero behind the tensor."""
        x = self.x[name][0 if self.cu is not None else i_n, t : t + 64, min(i_hv, self.x[name].shape[2] - 1)]
        return torch.cat((x, x.new_zeros(64 - len(x), *x.shape[1:])))

    def chunk_intra(self):
        """T, P and the factors of every chunk; what nobody writes stays NaN."""
        self.Ts, self.Ps, self.G, self.reach = (slots(self.slots, self.HV, *x) for x in ((64, 64), (64, 64), (64,), ()))
        for i_n in range(self.N):
            if self.cu is None:
                bos, eos, slot = 0, self.T, i_n * self.slots_per_row
            else:
                (bos, eos), slot = self.bounds_of(i_n), self.bounds_of(i_n)[0] // 64 + i_n
            for i, t in enumerate(range(bos, eos, 64)):
                for i_hv in range(self.HV):
                    q, k, g, beta = (self.tokens(name, i_n, t, i_hv).clone() for name in ("q", "k", "g", "beta"))
                    for y in (q, k, g, beta):
                        y[eos - t :] = 0
                    G = g.cumsum(0)
                    D = (G[:, None] - G).tril().exp().tril()
                    A = torch.linalg.inv(torch.eye(64).double() + (beta[:, None] * (k @ k.T)).tril(-1))
                    at = slot + i, i_hv
                    self.Ts[at], self.Ps[at], self.G[at] = D * A * beta, SCALE * D * (q @ k.T), G
                    growth = (1 - beta * k.square().sum(1)).abs().clamp_min(1).log().sum()
                    self.reach[at] = (G[-1] + growth) / torch.tensor(2.0).log()

    def forward(self, S, slot, i_n, t, valid, i_hv, values=True):
        k, v = (self.tokens(name, i_n, t, i_hv).clone() for name in ("k", "v"))
        k[valid:], v[valid:] = 0, 0
        G = self.G[slot, i_hv][:, None]
        if not values:
            v = v.new_zeros(64, S.shape[1])
        return G[-1].exp() * S + k.T @ ((G[-1] - G).exp() * (self.Ts[slot, i_hv] @ (v - G.exp() * (k @ S))))

    def backward(self, R, slot, i_n, t, valid, i_hv):
        q, k, do = (self.tokens(name, i_n, t, i_hv).clone() for name in ("q", "k", "do"))
        q[valid:], k[valid:], do[valid:] = 0, 0, 0
        G = self.G[slot, i_hv][:, None]
        dvn = (G[-1] - G).exp() * (k @ R) + self.Ps[slot, i_hv].T @ do
        dw = self.Ts[slot, i_hv].T @ dvn
        return G[-1].exp() * R - k.T @ (G.exp() * dw) + SCALE * q.T @ (G.exp() * do)

    def within_reach(self, slot, i_hv, step, count):
        left = 0
        for i in range(count):
            left += self.reach[slot + step * i, i_hv]
            if left <= LIMIT:
                return i + 1
        return count + 1

    def segment_states(self, whole=False):
        cut = self.cut
        self.starts = slots(2 * cut.number, self.HV, self.K, self.V)
        self.transfers = slots(cut.number, self.HV, self.K, self.K)
        self.exact = slots(2 * cut.number, self.HV)
        for i_g in range(cut.number):
            i_n, i_s, bos, eos, slot = self.find_segment(i_g)
            bos += i_s * cut.chunks * 64
            slot += i_s * cut.chunks
            if not (i_s == 0 or (i_s > 0 and bos - whole * cut.chunks * 64 < eos)):
                continue
            behind = (eos - bos + 63) // 64 - cut.chunks
            for i_hv in range(self.HV):
                for block in ("N", "M") if whole else ("N", "M", "reverse"):
                    reverse = block == "reverse"
                    if reverse:
                        count = min(max(behind, 0), cut.chunks)
                    else:
                        count = min(behind + 2 * cut.chunks, cut.chunks) if i_s > 0 else 0
                    edge = behind <= cut.chunks if reverse else i_s <= 1 and not whole
                    first = slot + (cut.chunks if reverse else count - cut.chunks - 1)
                    found = self.within_reach(first, i_hv, 1 if reverse else -1, count)
                    if block == "M":
                        if found <= count and not whole:
                            found = self.within_reach(slot - cut.chunks, i_hv, 1, count)
                        if found <= count or edge:
                            continue
                        n, S = count, torch.eye(self.K, dtype=torch.float64)
                    else:
                        n, S = min(found, count), torch.zeros(self.K, self.V, dtype=torch.float64)
                        at = i_g + (cut.number if reverse else 0), i_hv
                        self.exact[at] = found > count and not edge
                        if found > count and edge:
                            S = self.x["dht" if reverse else "initial_state"][i_n, i_hv]
                    shift = cut.chunks if reverse else count - cut.chunks - n
                    for c in reversed(range(n)) if reverse else range(n):
                        place = slot + shift + c, i_n, bos + (shift + c) * 64
                        valid = min(eos - place[2], 64)
                        if reverse:
                            S = self.backward(S, *place, valid, i_hv)
                        else:
                            assert valid == 64
                            S = self.forward(S, *place, valid, i_hv, block == "N")
                    if block == "M":
                        self.transfers[i_g, i_hv] = S
                    else:
                        self.starts[at] = S

    def segment_starts(self):
        cut = self.cut
        for i_n in range(self.N):
            first, count = i_n * cut.per_row, cut.per_row
            if self.cu is not None:
                bos, eos = self.bounds_of(i_n)
                first, count = bos // (64 * cut.chunks) + i_n, -(-(eos - bos) // (64 * cut.chunks))
            for reverse in (False, True):
                step, start, m = (
                    (-1, cut.number + first + count - 1, first + count + 1) if reverse else (1, first, first)
                )
                for j in range(2, count):
                    for i_hv in range(self.HV):
                        at = start + step * j, i_hv
                        if self.exact[at]:
                            M = self.transfers[m + step * j, i_hv]
                            self.starts[at] += (M.T if reverse else M) @ self.starts[at[0] - step, i_hv]

    def chunk_states(self):
        cut, x = self.cut, self.x
        self.h, self.dh, self.dh0 = (slots(n, self.HV, self.K, self.V) for n in (self.slots, self.slots, self.N))
        for i_g in range(cut.number):
            i_n, i_s, bos, eos, slot = self.find_segment(i_g)
            bos += i_s * cut.chunks * 64
            slot += i_s * cut.chunks
            length = 0 if i_s < 0 else max(min(eos - bos, cut.chunks * 64), 0)
            if length == 0 and i_s != 0:
                continue
            for i_hv in range(self.HV):
                S, R = (
                    (self.starts[i_g, i_hv], self.starts[cut.number + i_g, i_hv])
                    if cut.split
                    else (x["initial_state"][i_n, i_hv], x["dht"][i_n, i_hv])
                )
                n = -(-length // 64)
                for c in range(n):
                    self.h[slot + c, i_hv] = S
                    S = self.forward(S, slot + c, i_n, bos + c * 64, min(length - c * 64, 64), i_hv)
                for c in reversed(range(n)):
                    self.dh[slot + c, i_hv] = R
                    R = self.backward(R, slot + c, i_n, bos + c * 64, min(length - c * 64, 64), i_hv)
                if i_s == 0:
                    self.dh0[i_n, i_hv] = R


def truth(x):
    """States before, and gradients with respect to those behind, every chunk, by sequence; dh0. By autograd."""
    q, k, v, g, beta, h0 = (x[name] for name in ("q", "k", "v", "g", "beta", "initial_state"))
    cu = x.get("cu_seqlens")
    dh0 = chunked_bwd(q, k, v, chunked(q, k, v, g, beta, SCALE, h0, cu).chunks.join(
        chunked(q, k, v, g, beta, SCALE, h0, cu).g_cumsum), beta, x["do"], x["dht"], SCALE, h0, cu)[5]  # fmt: skip
    h, dh = {}, {}
    for n in range(len(h0)):
        row, (bos, eos) = (n, (0, q.shape[1])) if cu is None else (0, cu[n : n + 2].tolist())
        part = lambda y, t, end: y[row : row + 1, t:end]  # noqa: E731, B023
        S = h0[n : n + 1]
        for i, t in enumerate(range(bos, eos, 64)):
            h[n, i] = S[0]
            end = min(t + 64, eos)
            S = chunked(*(part(y, t, end) for y in (q, k, v, g, beta)), SCALE, S).ht
            # What comes behind the chunk.
            R = torch.zeros_like(S, requires_grad=True)
            rest = [part(y, end, eos) for y in (q, k, v, g, beta, x["do"])]
            out = chunked(*rest[:5], SCALE, R)
            dh[n, i] = torch.autograd.grad((out.o, out.ht), R, (rest[5], x["dht"][n : n + 1]))[0][0]
    return h, dh, dh0


CASES = {
    "dense": dict(lengths=None, B=2, T=460),
    "whole segments": dict(lengths=None, T=384),
    "packed": dict(lengths=[300, 0, 64, 450, 1, 128, 129, 0]),
    "padded": dict(lengths=[290, 70], T=450),
}


@pytest.mark.parametrize("segment", [1, 2, 3, 100], ids=lambda n: f"of {n}")
@pytest.mark.parametrize("regime", ["none", "slow", "fast", "mixed", "strong", "reset"])
@pytest.mark.parametrize("case", CASES)
def test_as_whole(case, regime, segment):
    """Every chunk has the state before it and the gradient behind it, and every sequence its dh0."""
    x = problem(regime=regime, **CASES[case])
    if case == "padded":
        for name in ("q", "k", "v", "g", "beta", "do"):
            x[name][:, 360:] = torch.nan
    ours = Launches(x, segment)
    assert ours.cut.split == (segment < 100)
    h, dh, dh0 = truth(x)
    torch.testing.assert_close(ours.dh0, dh0, rtol=1e-8, atol=1e-8)
    used = set()
    for n, i in h:
        slot = n * ours.slots_per_row if ours.cu is None else ours.bounds_of(n)[0] // 64 + n
        torch.testing.assert_close(ours.h[slot + i], h[n, i], rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(ours.dh[slot + i], dh[n, i], rtol=1e-8, atol=1e-8)
        used.add(slot + i)
    assert all(ours.h[slot].isnan().all() for slot in range(ours.slots) if slot not in used)
    if case == "whole segments" and segment < 3:
        exact = ours.exact[:, 0]
        assert (exact == 1).any() == (regime in ("none", "slow", "mixed"))


def test_keys_that_grow_a_state():
    """Decay or not, nothing may be dropped of a state, or of a gradient, that grows behind keys longer than sqrt(2 / beta)."""
    x = problem(None, "none", T=384)
    x["k"] *= 1.2
    x["g"] -= 0.3
    x["beta"] = 2 * x["beta"]
    ours = Launches(x, 2)
    assert ours.reach.max() < 0  # of each chunk, though tokens grow it
    h, dh, dh0 = truth(x)
    for (n, i), S in h.items():
        torch.testing.assert_close(ours.h[i], S, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(ours.dh[i], dh[n, i], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("cu", [[0, 5000, 2000], [700, 100, 90000], [-5, 3, 640], [640, 640, 640], [500, 640, 0]])
def test_contents_that_make_no_sense(cu):
    """No slot outside of the tensors is touched."""
    x = problem([320, 320], "none")
    x["cu_seqlens"] = torch.tensor(cu)
    for segment in (1, 2, 3):
        Launches(x, segment)


def test_transfer_in_reverse_is_the_transpose():
    """The gradient before a run of tokens is M^T times the one behind, and what comes of do alone."""
    x = problem(None, "slow", T=150, HV=1, K=4, V=3)
    arguments = {name: x[name] for name in ("q", "k", "v", "g", "beta")}

    def function(q, k, v, g, beta, initial_state, output_final_state):
        out = chunked(q, k, v, g, beta, SCALE, initial_state)
        return out.o, out.ht

    call = Call(function, arguments)
    _, M = affine_pair(call, None, True)
    R, zero = x["dht"][0], torch.zeros_like(x["dht"][0])
    D, dh0 = affine_pair_bwd(call, x["do"], zero), affine_pair_bwd(call, x["do"], R)
    torch.testing.assert_close(M.mT @ R + D, dh0, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("segment", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("regime", ["none", "slow", "fast", "mixed"])
def test_map_of_a_whole_row(regime, segment):
    """N and M of every segment, the first and a shorter last one too, composed as affine_map of segment_states.py does."""
    x = problem(None, regime, T=320)
    ours = Launches(x, 100)
    parts = -(-5 // segment)
    ours.cut = Segments(True, parts + 1, segment, parts + 1, 0)
    ours.segment_states(whole=True)
    for i_hv in range(ours.HV):
        N, M = torch.zeros(ours.K, ours.V).double(), torch.eye(ours.K).double()
        for g in range(1, parts + 1):
            m = ours.transfers[g, i_hv] if ours.exact[g, i_hv] else torch.zeros_like(M)
            N, M = m @ N + ours.starts[g, i_hv], m @ M
        row = {name: x[name][:, :, i_hv : i_hv + 1] for name in ("v", "g", "beta")} | {"q": x["q"], "k": x["k"]}
        call = Call(
            lambda *, initial_state, output_final_state, **y: (None, chunked(**y, scale=SCALE, h0=initial_state).ht),
            row,
        )
        expected = affine_pair(call, None, True)
        torch.testing.assert_close(N, expected[0][0], rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(M, expected[1][0], rtol=1e-8, atol=1e-8)
