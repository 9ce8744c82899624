"""Format of the data that travels from a rank to the collector: the only code that both sides share.

In msgpack a batch's integer columns are raw little-endian arrays, delta coded if that is smaller. Its spans are packed
separately, in the form in which they are stored. In JSON, meant for curl and for tests, columns are plain lists.
"""

from ddpobs.wire.account import WARM_UP_STEPS, Account, Outside, OutsideInterval, TelemetryCost
from ddpobs.wire.checks import check
from ddpobs.wire.coding import JSON, MSGPACK, acknowledgement, decode, encode, encode_json, pack, pack_json, unpack
from ddpobs.wire.fields import (
    COMM_KINDS,
    LONGEST_NS,
    MAX_STEP,
    NO_ORIGIN,
    OUTSIDE_KINDS,
    OWN_PHASES,
    PHASES,
    STRAGGLER_SHARE,
    SYNCHRONISED,
    UNIT_KINDS,
    UNKNOWN,
    Ints,
    Scalar,
)
from ddpobs.wire.pulse import CodePlace, Input, Machine, Pulse
from ddpobs.wire.rows import Comms, Spans, Steps
from ddpobs.wire.schema import (
    VERSION,
    Acknowledgement,
    Anchor,
    Batch,
    Bucket,
    Event,
    Fingerprint,
    Hello,
    Layout,
    Parameter,
    Peers,
    Readiness,
    Unused,
    records,
)
from ddpobs.wire.tables import pack_spans, pack_steps, unpack_spans, unpack_steps
from ddpobs.wire.text import printable

__all__ = [
    "COMM_KINDS",
    "JSON",
    "LONGEST_NS",
    "MAX_STEP",
    "MSGPACK",
    "NO_ORIGIN",
    "OUTSIDE_KINDS",
    "OWN_PHASES",
    "PHASES",
    "STRAGGLER_SHARE",
    "SYNCHRONISED",
    "UNIT_KINDS",
    "UNKNOWN",
    "VERSION",
    "WARM_UP_STEPS",
    "Account",
    "Acknowledgement",
    "Anchor",
    "Batch",
    "Bucket",
    "CodePlace",
    "Comms",
    "Event",
    "Fingerprint",
    "Hello",
    "Input",
    "Ints",
    "Layout",
    "Machine",
    "Outside",
    "OutsideInterval",
    "Parameter",
    "Peers",
    "Pulse",
    "Readiness",
    "Scalar",
    "Spans",
    "Steps",
    "TelemetryCost",
    "Unused",
    "acknowledgement",
    "check",
    "decode",
    "encode",
    "encode_json",
    "pack",
    "pack_json",
    "pack_spans",
    "pack_steps",
    "printable",
    "records",
    "unpack",
    "unpack_spans",
    "unpack_steps",
]
