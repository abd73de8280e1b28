"""Hopper: WGMMA, TMA with multicast, and cp.async for gathered rows."""
