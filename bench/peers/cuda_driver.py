"""What the driver's virtual memory calls take, for `ctypes`."""

import ctypes

_U64, _SIZE, _POINTER = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Prop(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


def declare(cuda: ctypes.CDLL) -> None:
    """Sets the arguments of the calls."""
    for name, arguments in {
        "cuMemCreate": [_POINTER, _SIZE, _POINTER, _U64],
        "cuMemAddressReserve": [_POINTER, _SIZE, _SIZE, _U64, _U64],
        "cuMemAddressFree": [_U64, _SIZE],
        "cuMemMap": [_U64, _SIZE, _SIZE, _U64, _U64],
        "cuMemSetAccess": [_U64, _SIZE, _POINTER, _SIZE],
        "cuMemUnmap": [_U64, _SIZE],
        "cuMemRelease": [_U64],
    }.items():
        getattr(cuda, name).argtypes = arguments
