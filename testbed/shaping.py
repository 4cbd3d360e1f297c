"""How an interface is held to a bandwidth: what `tc` is told.

The bandwidth of a link is what a program's bytes get, so the rate of the wire is that much and the headers on top. One
htb class a link holds the rate. Under it every (source, destination) pair that uses the link has a class of its own,
so that they share it evenly, byte by byte, whatever their windows are: with one queue for all, two flows got 77 and 23
of 100 Mbit/s, with bbr, cubic and reno alike; with a class each 49.5 and 50. (Kernels need not have sfq or fq_codel;
this one has neither.) Acknowledgements without data go before all: when they waited behind the data of the other
direction, a flow that began second got 19.2 of 20 Mbit/s over its first 1.5 s.

    1:1 rate ── 1:2 acknowledgements, ARP
             └─ 1:10, 1:11, ... a pair each, borrowing all but a hundredth from 1:1, in turns of one packet

Queues are long enough that a flow's window fits: nothing is dropped, as on the lossless networks of real clusters.

What passes for free makes short messages too fast, so it is kept small. It is what an idle link may send at once
(burst), and the packet that htb lets pass before it waits for it: 10 KB, or half a millisecond of a faster link;
and packets of at most a millisecond. 10 KB, 32 KB and 64 KB of burst all reached 99 % of 20, 100 and 1,000 Mbit/s, and
of 400 with both cores busy beside; 16 KB and packets of 64 KB made a message of 1 MB at 100 Mbit/s 5.5 % too fast,
these limits 1.6 %, and one of 4 MB 0.3 %.

All figures [Empirical]: 2-core VM, Linux 6.18, 2026-11-16.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MTU_BYTES = 9000
"""1,500, 9,000 and 65,000 bytes cost about the same time, since many packets of a flow pass through the machine as one;
1,500 spend 4.5 % on headers, 65,000 make the smallest unit so large that slow links are shared in lumps. [Empirical]"""

_HEADER_BYTES = 52  # IPv4, and TCP with timestamps
_ETHERNET_BYTES = 14
WIRE_SHARE = (MTU_BYTES + _ETHERNET_BYTES) / (MTU_BYTES - _HEADER_BYTES)
"""What is on the wire for every byte of a program's."""

_MIN_BURST_BYTES = 10_000
_BURST_SECONDS = 0.0005
_MAX_PACKET_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Packets:
    """How large packets may be: what a link carries in so much time, but not less than so many bytes."""

    min_bytes: int
    seconds: float


FINE = Packets(2 * MTU_BYTES, 0.001)
COARSE = Packets(5 * MTU_BYTES, 0.0025)
"""For testbeds whose ranks have quotas. Every packet costs an interrupt or two for each link on its way, and the kernel
counts that time as the time of the rank that is interrupted: with fine packets, six flows of 50 Mbit/s or two of 200
made uninvolved ranks 6 to 14 % slower, with coarse ones 3 to 6 %; two flows of 100 or six of 20, 2 to 5 %. What it
costs: an idle link passes 256 KB 17 % too fast at 100 Mbit/s, 1 MB 2 %, 4 MB 0.3 % (fine: 3.4, 0.2 and 0 %)."""

_CLASS_BURST_BYTES = 1_600  # a class of its own must not bring the link a burst more
_QUEUE_BYTES = 4_000_000
WINDOW_BYTES = 1_048_576
"""The most that a socket may have sent and not seen acknowledged: with the kernel's bookkeeping well below a queue."""

_MAX_PAIR_CLASSES = 64
_FIRST_PAIR_CLASS = 0x10


def largest_packet_bytes(bytes_per_second: float, packets: Packets = FINE) -> int:
    """What a device may hand to a link of this bandwidth as one packet (the kernel's gso_max_size)."""
    return round(min(max(packets.min_bytes, bytes_per_second * packets.seconds), _MAX_PACKET_BYTES))


def shape(
    interface: str, bytes_per_second: float, pairs: Sequence[tuple[str, str]], packets: Packets = FINE
) -> list[str]:
    """Lines for `tc -batch`: hold an interface to a bandwidth that the (source, destination) addresses share."""
    rate = bytes_per_second * WIRE_SHARE
    burst = round(max(_MIN_BURST_BYTES, rate * _BURST_SECONDS))
    flows = _matches(pairs)
    own = f"rate {_bits(rate / (100 * (len(flows) + 1)))} burst {_CLASS_BURST_BYTES}b"
    whole = f"ceil {_bits(rate)} cburst {burst}b quantum {largest_packet_bytes(bytes_per_second, packets)}"
    lines = [
        f"qdisc add dev {interface} root handle 1: htb default 2",
        f"class add dev {interface} parent 1: classid 1:1 htb rate {_bits(rate)} burst {burst}b {whole}",
        f"class add dev {interface} parent 1:1 classid 1:2 htb prio 0 {own} {whole}",
        f"qdisc add dev {interface} parent 1:2 bfifo limit {_QUEUE_BYTES}",
        # Exactly the length of headers with timestamps, and of the flags only ACK: what has no data, opens and closes
        # nothing, and may overtake.
        f"filter add dev {interface} parent 1: protocol ip prio 1 u32 match u16 {_HEADER_BYTES} 0xffff at 2"
        " match u8 0x10 0xff at 33 flowid 1:2",
    ]
    for number, match in enumerate(flows, start=_FIRST_PAIR_CLASS):
        lines += [
            f"class add dev {interface} parent 1:1 classid 1:{number:x} htb prio 1 {own} {whole}",
            f"qdisc add dev {interface} parent 1:{number:x} bfifo limit {_QUEUE_BYTES}",
            f"filter add dev {interface} parent 1: protocol ip prio 2 u32 {match} flowid 1:{number:x}",
        ]
    return lines


def _matches(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """A filter for every pair; where they are too many, for every source."""
    if len(pairs) <= _MAX_PAIR_CLASSES:
        return [f"match ip src {source}/32 match ip dst {destination}/32" for source, destination in pairs]
    return [f"match ip src {source}/32" for source in dict.fromkeys(source for source, _ in pairs)]


def _bits(bytes_per_second: float) -> str:
    return f"{max(8, round(bytes_per_second * 8))}bit"
