"""All claims, in the order of the page."""

from pathlib import Path

from ._claims import read

CLAIMS = read(Path(__file__).with_name("claims.toml"))
