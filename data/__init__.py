"""The order of tokens: text files become token shards, and a sample index becomes a row of tokens.

``python -m data.prepare`` writes a folder, ``data.loader.open_prepared`` reads it. Nothing here knows models or ranks.
"""
