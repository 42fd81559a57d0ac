"""What the commands that serve do first."""

from __future__ import annotations

from cllm.cli.remarks import print_notes
from cllm.config.sources import LoadedConfig
from cllm.observe import log
from cllm.server.access import Access, check_access


def open_access(loaded: LoadedConfig, *, is_of_front: bool = False) -> Access:
    """Print the notes about the settings, begin to log as they say, and return the accounts.

    Raises what ``check_access`` raises.
    """
    print_notes(loaded)
    settings = loaded.settings
    log.configure(settings.log.level, settings.log.format, by_request=settings.log.allow_header)
    access = Access(settings, is_of_front=is_of_front)
    check_access(settings, access)
    return access
