"""Reading from the Hugging Face Hub: sizes are known before anything is downloaded, and errors are in words."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


LOGIN = "`hf auth login`, or HF_TOKEN"


def download_file(repo_id: str, filename: str, max_bytes: int, **hub_kwargs) -> Path:
    """
    A file of a repository, from the cache or the Hub.

    Args:
        repo_id (`str`):
            Repository.
        filename (`str`):
            Path of the file in it.
        max_bytes (`int`):
            Largest size. A file that the Hub says is larger, or says no size of, is not downloaded.
        **hub_kwargs:
            As in [`~huggingface_hub.hf_hub_download`].

    Returns:
        `pathlib.Path`: where it is in the cache.

    Raises:
        ValueError: when there is no such file, it cannot be reached, or it is too large.
    """
    from huggingface_hub import hf_hub_download

    try:
        found = hf_hub_download(repo_id, filename, **hub_kwargs, dry_run=True)
        if found.file_size is None or found.file_size > max_bytes:
            size = "does not say its size" if found.file_size is None else f"says it has {found.file_size:,} bytes"
            raise ValueError(
                f"{filename} of {repo_id} is not downloaded: the Hub {size}, and the limit for a file of this kind is "
                f"{max_bytes:,}."
            )
        return Path(hf_hub_download(repo_id, filename, **hub_kwargs))
    # The Hub client raises from several families (its own, the HTTP library's, OSError).
    except Exception as error:
        if type(error) is ValueError:
            raise
        raise ValueError(explain(error, repo_id, filename=filename, **_named(hub_kwargs))) from error


@contextmanager
def hub_errors(repo_id: str, *, revision: str | None = None, suffix: str = "") -> Iterator[None]:
    """
    Context in which errors of the Hub's client are raised in words.

    Args:
        repo_id (`str`): Repository that is asked for.
        revision (`str`, *optional*): Its revision.
        suffix (`str`, *optional*, defaults to `""`): What to say after the error.

    Raises:
        ValueError: for what the Hub refuses.
        ConnectionError: when it cannot be reached, or the connection breaks.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except Exception as error:
        if isinstance(error, HFValidationError) or isinstance(error, HfHubHTTPError) and _status(error) < 500:
            kind = ValueError
        elif type(error).__module__.partition(".")[0] in ("huggingface_hub", "httpx", "httpx2", "requests"):
            kind = ConnectionError
        elif isinstance(error, RuntimeError) and "to the Hub" in str(error):  # an upload of a large file
            kind = ConnectionError
        else:
            raise
        raise kind(f"{explain(error, repo_id, revision=revision)}{suffix}") from error


def explain(
    error: Exception,
    repo_id: str,
    *,
    revision: str | None = None,
    filename: str | None = None,
    repo_type: str | None = None,
    token: bool | str | None = None,
    local_files_only: bool = False,
) -> str:
    """
    What an error of the Hub's client means for the one who asked.

    Args:
        error (`Exception`): The error.
        repo_id (`str`): Repository that was asked for.
        revision (`str`, *optional*): Its revision.
        filename (`str`, *optional*): File that was asked for.
        repo_type (`str`, *optional*): Type of the repository, by default a model's.
        token (`bool` or `str`, *optional*): Token that was used.
        local_files_only (`bool`, *optional*, defaults to `False`): Whether only the cache was looked at.
    """
    from huggingface_hub import constants, errors

    if isinstance(error, errors.HFValidationError):
        return f"{repo_id!r:.200} is no repository id, which is user/name: {error}"
    if isinstance(error, errors.GatedRepoError):
        return f"{repo_id} is gated: ask for access on its page, and log in ({LOGIN})."
    if isinstance(error, errors.RepositoryNotFoundError):
        kind = repo_type or "model"
        other = _other_type(repo_id, kind, token)
        if other is not None:
            return f"{repo_id} is a {other} on the Hub. Schedules lie in model repositories."
        return f"the Hub has no {kind} repository {repo_id}, or it is private: check the name, and log in ({LOGIN})."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo_id} has no branch, tag or commit {revision!r:.200}."
    if isinstance(error, (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError)):
        offline = local_files_only or constants.HF_HUB_OFFLINE
        cause = error.__cause__ or error.__context__
        reason = (
            "it may not be asked (offline)" if offline else f"it cannot be reached ({_first_line(cause or error)})"
        )
        what = f"{filename} of {repo_id}" if filename else repo_id
        if filename is None:
            return f"The Hub was not asked about {what}: {reason}. Unset HF_HUB_OFFLINE."
        at = f" at revision {revision!r:.200}" if revision else ""
        return f"{what}{at} is not in the local cache, and the Hub is no help: {reason}. Load it once online."
    if isinstance(error, errors.EntryNotFoundError):
        at = f" at revision {revision!r:.200}" if revision else ""
        return f"{repo_id} has no {filename or 'such file'}{at}."
    status = _status(error)
    if status == 401:
        return f"The Hub does not accept the token, or there is none: log in ({LOGIN})."
    if status == 403:
        return f"The token does not allow this for {repo_id}: {_first_line(error)} Log in with another one ({LOGIN})."
    return f"The Hub did not answer as hoped for {repo_id}: {type(error).__name__}: {_first_line(error)}"


def _named(hub_kwargs: dict) -> dict:
    return {
        name: hub_kwargs[name] for name in ("revision", "repo_type", "token", "local_files_only") if name in hub_kwargs
    }


def _status(error: BaseException) -> int:
    return getattr(getattr(error, "response", None), "status_code", 0)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = f" ({_first_line(error.__cause__)})" if isinstance(error.__cause__, Exception) else ""
    text = f"{(lines or [type(error).__name__])[0]:.300}"
    return text if cause.strip(" ()") in text else text + cause


def _other_type(repo_id: str, kind: str, token: bool | str | None) -> str | None:
    """The type of a repository of this name that is of another type than `kind`, if there is one."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    for other in ("model", "dataset", "space"):
        try:
            if other != kind and api.repo_exists(repo_id, repo_type=other):
                return other
        except Exception:  # a hint is not worth another error
            return None
    return None
