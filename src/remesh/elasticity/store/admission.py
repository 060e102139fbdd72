"""Admission of agents to a job: the comparison of settings, signed with the job's token.

Every agent compares its job's card with the one in the store.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import torch.distributed as dist

from remesh.elasticity.store.card import JobCard, describe_difference
from remesh.foundation.errors import ConfigError
from remesh.foundation.settings import TOKEN
from remesh.wire.token import MIN_SECRET_BYTES, Token

CARD_KEY = "card"
MAX_CARD_BYTES = 64 << 10


def read_token(run_id: str, file: str | None = None) -> Token:
    """The job's secret, from a file or REMESH_TOKEN; never from the command line, which others can read."""
    source = f"--token-file {file}" if file else TOKEN.name
    try:
        secret = Path(file).read_bytes().strip() if file else TOKEN.read().encode()
    except OSError as error:
        raise ConfigError(f"reading {source}: {error}; give a file that this user can read") from error
    if (file or secret) and len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"reading {source}: found {len(secret)} bytes, expected {MIN_SECRET_BYTES} or more; make one with "
            "`python -c 'import secrets; print(secrets.token_hex())'`"
        )
    return Token(run_id, secret)


def show_card(store: dist.Store, token: Token, card: JobCard) -> Token:
    """Leave this job's card in the store, or compare it with the one that is there; ConfigError when they differ.

    The token that comes back answers the challenge on the card: all that follows is signed with it.
    """
    key = f"remesh/{token.run_id}/{CARD_KEY}"
    text = json.dumps({"card": card.to_json(), "challenge": secrets.token_hex(16)})
    found = bytes(store.compare_set(key, "", token.seal(CARD_KEY, text.encode()).decode()))
    data = token.unseal(CARD_KEY, found) if len(found) <= MAX_CARD_BYTES else None
    if data is None:
        raise ConfigError(
            f"joining job {token.run_id!r}: the token does not fit the one that its first node was started with; give "
            "all nodes the same --token-file (or REMESH_TOKEN), or another --rdzv-id if these are two jobs"
        )
    fields = json.loads(data)
    difference = describe_difference(token.run_id, card, fields["card"])
    if difference is not None:
        raise ConfigError(difference)
    return token.bound_to(str(fields["challenge"]))
