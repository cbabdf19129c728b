"""How sequences are cut into segments that are walked at the same time, and how long a walk takes: decided here, on the host.

Segment i of sequence n has slot n per_row + i, or, packed, bos // (64 chunks) + n + i: as chunks have, with 64 tokens more or less.
"""

from typing import NamedTuple

from flash_qla_tl.kernels.common.target import CHUNK

# On an H200. Before the first chunk of a segment, the state and the tiles being on their way.
START_US = 6.0
# Of the states before segments: a chunk of the heads which do not decay, two CTAs on an SM; a CTA more; a segment in segment_starts.
EXACT_US, CTA_US, FOLD_US = 0.9, 0.015, 1.5
# The share of heads that is taken not to decay; all, where lengths are not known.
EXACT_SHARE = 0.25
# The shortest segment, and the most of a sequence.
MIN_SEGMENT, MAX_PARTS = 8, 32


class Lengths(NamedTuple):
    """What the host knows of the sequences, in chunks."""

    number: int
    total: int
    longest: int  # at most: the total, where nobody said

    @classmethod
    def of(cls, number: int, num_tokens: int, packed: bool, num_chunks: int | None, longest: int | None):
        """num_tokens: of a row; num_chunks, longest: of packed sequences, where the caller knows them."""
        row = -(-num_tokens // CHUNK)
        total = (1 if packed else number) * row if num_chunks is None else num_chunks
        return cls(number, total, row if longest is None else longest)

    @property
    def equal(self) -> bool:
        return self.total == self.longest * self.number

    @property
    def known(self) -> bool:
        return self.equal or self.longest < self.total


class Segments(NamedTuple):
    """How the sequences of a launch are cut."""

    split: bool
    number: int  # slots
    chunks: int
    per_row: int  # of a row that is not packed
    search_steps: int  # to the sequence of a slot

    @classmethod
    def of(cls, chunks: int, lengths: Lengths, num_tokens: int, packed: bool):
        """Into segments of so many chunks."""
        row = -(-num_tokens // CHUNK)
        if chunks >= lengths.longest:
            # A whole sequence is a segment with room for one chunk more: none begins behind it.
            return cls(False, lengths.number, row + 1, 1, 0)
        per_row = -(-row // chunks)
        number = num_tokens // (chunks * CHUNK) + lengths.number if packed else lengths.number * per_row
        return cls(True, number, chunks, per_row, lengths.number.bit_length())


def pick(
    step_us: dict[int, float], rows: int, before_us: float, blocks: int, lengths: Lengths, num_sms: int, split: bool
) -> tuple[int, int]:
    """-> the rows of a CTA, and the chunks of a segment: what takes least time.

    A head is split over two CTAs where that fills the card better. Sequences are split (if `split`) into segments of a length where
    that gains more than what goes before the walk then may cost.

    step_us: a chunk of the walk with all SMs busy, by the rows that a CTA may have. rows: of a sequence, all heads. before_us: of what
    goes before a walk in segments, with the few chunks that heads which decay take; blocks: its CTAs a segment.
    """
    best, VR, chunks = min(
        (whole_us(us, rows // VR, lengths, num_sms), VR, max(lengths.longest, 1)) for VR, us in step_us.items()
    )
    for parts in range(2, MAX_PARTS + 1) if split else ():
        c = -(-lengths.longest // parts)
        before = before_us + _before_us(blocks, lengths, c, parts, num_sms)
        for x, step in step_us.items() if c >= MIN_SEGMENT else ():
            us = segments_us(step, rows // x, lengths, c, num_sms) + before
            if us < best:
                best, VR, chunks = us, x, c
    return VR, chunks


def whole_us(step: float, ctas: int, lengths: Lengths, num_sms: int) -> float:
    """Of a walk over whole sequences, of so many CTAs each."""
    mean = -(-lengths.total // lengths.number)
    equal = step * mean * -(-lengths.number * ctas // num_sms)
    if lengths.equal:
        return equal
    if lengths.known:
        # All SMs are busy until the longest begins, at worst.
        return step * (lengths.total * ctas / num_sms + lengths.longest)
    # The more they are, the less is lost by one that is twice as long as the others and comes last.
    uneven = step * (lengths.total * ctas / num_sms + 2 * mean)
    return equal + (uneven - equal) / lengths.number


def segments_us(step: float, ctas: int, lengths: Lengths, segment: int, num_sms: int) -> float:
    """Of a walk in segments of so many chunks."""
    if lengths.equal:
        segments = lengths.number * -(-lengths.longest // segment)
        return (step * segment + START_US) * -(-segments * ctas // num_sms)
    return (step + START_US / segment) * (lengths.total * ctas / num_sms + segment)


def _before_us(blocks: int, lengths: Lengths, segment: int, parts: int, num_sms: int) -> float:
    """Of the states before segments; blocks: CTAs a segment, of which those of heads which decay are short."""
    exact = blocks * (EXACT_SHARE if lengths.known else 1)
    walk = EXACT_US * (segment + lengths.total * exact / 2 / num_sms)
    return walk + CTA_US * lengths.number * parts * blocks + FOLD_US * parts


def launched_early(ctas: int, VR: int, num_sms: int) -> bool:
    """Whether a walk of whole sequences comes before the end of the kernel in front of it: 2 to 5 us less, but 2 to 8% more where halves of
    heads (VR = 64) take more than half of the card."""
    return VR == 128 or 2 * ctas <= num_sms
