"""Checkpoints of the Hugging Face hub, by `organisation/name`."""

from __future__ import annotations

import re
from pathlib import Path

from checkpoints._errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_WANTED = ["config.json", "generation_config.json", "*.safetensors", "model.safetensors.index.json"]
_TOKENIZER = ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"]
_MORE = ["added_tokens.json", "chat_template.jinja"]


def is_hub_id(name: str) -> bool:
    """Whether a name has the form `organisation/name`."""
    return _HUB_ID.fullmatch(name) is not None and ".." not in name


def fetch_hub_model(name: str, *, show_progress: bool) -> Path:
    """The directory of a hub model, downloaded first when the hub's cache does not hold it.

    Raises `CheckpointError` when it is not cached and cannot be reached, does not exist or needs a login.
    """
    import huggingface_hub
    import huggingface_hub.errors as errors
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        """A progress bar that is not shown."""

        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **(options | {"disable": True}))

    def refuse(what: str) -> CheckpointError:
        return CheckpointError(f"{name}: {what}.")

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                allow_patterns=[*_WANTED, *_TOKENIZER, *_MORE],
                ignore_patterns=["original/*", "consolidated*"],
                tqdm_class=tqdm if show_progress else Silent,
            )
        )
    except errors.GatedRepoError:
        raise refuse("the model needs a licence to be accepted on the hub; accept it and run `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise refuse("the hub has no such model, or it is private; check the name or run `hf auth login`") from None
    except errors.LocalEntryNotFoundError:
        raise refuse("not in the local cache and the hub cannot be reached; go online or give a local path") from None
    except Exception as error:
        # Network layers below the hub raise types of their own.
        reason = (" ".join(str(error).split()) or type(error).__name__)[:200].rstrip(".")
        raise refuse(f"the hub cannot be reached or answered with an error ({reason}); try again later") from None
