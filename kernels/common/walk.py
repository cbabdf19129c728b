"""Macros of a CTA that walks the chunks of one sequence with a state in registers.

The state is V-first: S is a fragment of rows [v0, v0 + VR) of [V, K]. In memory it is [V, K] or [K, V].
"""

import tilelang.language as T


@T.macro
def advance(s: T.Ref, phase: T.Ref, stages):
    """On to the next chunk: its stage in a ring, and the parity of the ring's barriers."""
    s += 1
    if s == stages:
        s = 0
        phase ^= 1


@T.macro
def bounds_of(i_n, bos: T.Ref, eos: T.Ref, cu_seqlens, cu_stride, num_tokens):
    """Where sequence i_n begins and ends. The contents of cu_seqlens are the caller's: whatever they are, in [0, num_tokens]."""
    bos = T.min(T.max(cu_seqlens[i_n * cu_stride], 0), num_tokens)
    eos = T.min(T.max(cu_seqlens[(i_n + 1) * cu_stride], bos), num_tokens)  # noqa: F841 (it is the caller's)


@T.macro
def find_sequence(
    i_n: T.Ref, bos: T.Ref, eos: T.Ref, cu_seqlens, cu_stride, slot, tokens, num_tokens, num_seqs, search_steps
):
    """The sequence of a slot of `tokens` tokens, and its bounds, where sequence n has the slots from cu_seqlens[n] // tokens + n on.

    i_n comes as 0, or, with no step to search, as the sequence itself.
    """
    for r in T.serial(search_steps):
        later = i_n + (1 << (search_steps - 1 - r))
        if later < num_seqs:
            if T.min(T.max(cu_seqlens[later * cu_stride], 0), num_tokens) // tokens + later <= slot:
                i_n = later
    bounds_of(i_n, bos, eos, cu_seqlens, cu_stride, num_tokens)


@T.macro
def find_segment(
    i_n: T.Ref,
    i_s: T.Ref,
    bos: T.Ref,
    eos: T.Ref,
    i_g,
    cu_address,
    cu_stride,
    segment_chunks,
    segments_per_row,
    num_tokens,
    num_seqs,
    search_steps,
):
    """Slot i_g of segments: which sequence, which of its segments, and the sequence's bounds; these come as 0 and num_tokens, i_n as 0.

    With no step to search every sequence is one segment. Behind a sequence's end, and with contents of cu_seqlens that make no
    sense before its begin, there may be slots of no segment.
    """
    if cu_address != 0:
        if search_steps == 0:
            i_n = i_g
        cu_seqlens = T.make_tensor_from_addr(cu_address, (1 << 30,), "int32")
        tokens = segment_chunks * 64
        find_sequence(i_n, bos, eos, cu_seqlens, cu_stride, i_g, tokens, num_tokens, num_seqs, search_steps)
        i_s = i_g - T.truncdiv(bos, tokens) - i_n  # noqa: F841 (it is the caller's)
    else:
        i_n = T.truncdiv(i_g, segments_per_row)
        i_s = i_g - i_n * segments_per_row  # noqa: F841


@T.macro
def find_slot(slot: T.Ref, i_n, address, stride, pad_slot, num_slots):
    """slot = where in the tensor of states sequence i_n has its own: i_n, or what the indices at an address say; -1 if nowhere.

    Whatever the indices are, nothing outside of num_slots is touched.
    """
    slot = i_n
    if address != 0:
        indices = T.make_tensor_from_addr(address, (1 << 30,), "int32")
        slot = indices[i_n * stride]
        if slot == pad_slot or slot < 0 or slot >= num_slots:
            slot = -1


@T.macro
def load_state(S, address, first, kind, v_first, v0, K, V):
    """S = the state that begins at number `first` of a tensor of run-time type (as for qla_load) at an address."""
    if kind == 0:
        _load_state(S, address + first * 4, "float32", v_first, v0, K, V)
    elif kind == 1:
        _load_state(S, address + first * 2, "bfloat16", v_first, v0, K, V)
    else:
        _load_state(S, address + first * 2, "float16", v_first, v0, K, V)


@T.macro
def _load_state(S, address, dtype, v_first, v0, K, V):
    state = T.make_tensor_from_addr(address, (V * K,), dtype)
    if v_first != 0:
        for a, b in T.Parallel(S.shape[0], K):
            S[a, b] = T.cast(state[(v0 + a) * K + b], "float32")
    else:
        for a, b in T.Parallel(S.shape[0], K):
            S[a, b] = T.cast(state[b * V + v0 + a], "float32")


@T.macro
def store_state(S, address, dtype, v_first, v0, K, V):
    """The state at an address = S."""
    state = T.make_tensor_from_addr(address, (V * K,), dtype)
    if v_first != 0:
        for a, b in T.Parallel(S.shape[0], K):
            state[(v0 + a) * K + b] = S[a, b]
    else:
        for a, b in T.Parallel(S.shape[0], K):
            state[b * V + v0 + a] = S[a, b]


@T.macro
def store_state_as(S, address, first, kind, v_first, v0, K, V):
    """The reverse of load_state."""
    if kind == 0:
        store_state(S, address + first * 4, "float32", v_first, v0, K, V)
    elif kind == 1:
        store_state(S, address + first * 2, "bfloat16", v_first, v0, K, V)
    else:
        store_state(S, address + first * 2, "float16", v_first, v0, K, V)
