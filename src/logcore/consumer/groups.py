"""The former import path of `LocalGroups`, for programs that still use it."""

from logcore.coordinators.local_groups import LocalGroups as Groups

__all__ = ["Groups"]
