"""Secrets in files, and the key of an encrypted folder of content files: AES-256-GCM by the `cryptography` package, an
optional extra.

Used by content_files, whoever opens such a folder, and `attach`; knows nothing of what is encrypted.
"""

import os
import secrets
import stat
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

from pagedcli.errors import UsageError
from pagedcli.files import read_whole

_LEAST_BYTES, _MOST_BYTES = 32, 4096
_NONCE_BYTES = 12


class WrongKey(Exception):
    """Something is not what was encrypted with this key."""


class ContentKey:
    """Encrypts and decrypts with a secret; what is encrypted twice is never the same bytes."""

    def __init__(self, secret: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(_derived(secret, b"content"))
        self._name_key = _derived(secret, b"names")
        self.digest = _derived(secret, b"digest").hex()[:32]  # tells keys apart without showing them

    @classmethod
    def of(cls, path: Path, *, makes_file: bool = True) -> "ContentKey":
        """The key in a file, which is made if it does not exist, unless it should. Raises: UsageError."""
        if find_spec("cryptography") is None:
            hint = "pip install 'pagedcli[encryption]'"
            raise UsageError("a key needs the cryptography package, which is not installed", hint=hint)
        secret, mode = read_secret(path, _LEAST_BYTES, makes_file=makes_file), path.stat().st_mode
        if stat.S_ISREG(mode) and stat.S_IMODE(mode) & 0o077:
            raise UsageError(f"the key {path} can be read by other users", hint=f"chmod 600 {path}")
        return cls(secret)

    def encrypt(self, content: bytes | bytearray | memoryview, about: str) -> bytes:
        """The content, to be decrypted only as what it is `about`."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, content, about.encode())

    def decrypt(self, content: bytes, about: str) -> bytes:
        """Raises: WrongKey."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(content[:_NONCE_BYTES], content[_NONCE_BYTES:], about.encode())
        except (InvalidTag, ValueError) as error:
            raise WrongKey("not what was encrypted with this key") from error

    def name(self, content: bytes) -> str:
        """32 hexadecimal digits that only the key and the content determine."""
        return blake2b(content, key=self._name_key, digest_size=16).hexdigest()


def read_secret(path: Path, least_bytes: int, *, makes_file: bool = True) -> bytes:
    """The secret in a file, which is made if it does not exist, unless it should. Raises: UsageError."""
    try:
        if makes_file and not path.exists():
            with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(secrets.token_hex(32).encode())
        secret = read_whole(path, _MOST_BYTES).strip()
    except OSError as error:
        raise UsageError(f"the key {path} cannot be used: {error.strerror}") from error
    if len(secret) < least_bytes:
        raise UsageError(
            f"the key {path} has {len(secret)} bytes, too few for a secret",
            hint=f"at least {least_bytes} that nobody can guess; a file that does not exist is made",
        )
    return secret


def _derived(secret: bytes, use: bytes) -> bytes:
    return blake2b(secret, digest_size=32, person=use).digest()
