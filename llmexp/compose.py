"""From command-line overrides to a config: where conf/ is, what `gpu=auto` means, and errors in plain words."""

import errno
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from llmexp import hardware, secrets
from llmexp.errors import ConfigError
from llmexp.schema.config import Config, no_secret, no_such_key, register_defaults, validate
from llmexp.words import either, nearest

_SIMULATED_GPU = "h100"


def conf_dir() -> Path:
    """The folder of config files: inside the package when installed, at the repository's root in a checkout."""
    package = Path(__file__).parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def compose(overrides: Sequence[str]) -> Config:
    """The config that a command line with these overrides runs.

    Raises ConfigError that names the key, what it got and what is accepted.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    register_defaults()
    with plain_words():
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return resolve(hydra_compose("config", overrides=open_keys(overrides)))


def open_keys(overrides: Sequence[str]) -> list[str]:
    """Lets `engine.args.NAME=` and `engine.env.NAME=` add keys, which Hydra asks a `+` for.

    Raises ConfigError for a key that is named like a secret, before anybody can quote its value, and for a group with
    anything but names of its files, or without a key.
    """
    if key := secrets.named_in_overrides(overrides):
        raise ConfigError(no_secret(key))
    return [re.sub(r"^(?=engine\.(args|env)\.)", "++", _of_a_group(override)) for override in overrides]


_NO_OVERRIDE = "not understood; accepted is KEY=VALUE, or a command such as audit, report or doctor"


def _of_a_group(override: str) -> str:
    """An override as it is; one of a group without what Hydra does not need there: a `+`, and quotes."""
    group, equals, value = override.lstrip("+").partition("=")
    if equals and not group.strip("~/ "):
        raise ConfigError(f"{override}: {_NO_OVERRIDE}")
    if not equals or not group.isidentifier() or not (conf_dir() / group).is_dir():
        return override
    if value.startswith("["):
        raise ConfigError(f"{group}: got {value}, a list; a group takes one name (-m makes a study)")
    plain = re.sub(r"""(['"])(\w+)\1""", r"\2", value)
    for name in re.findall(r"[^\s,()]+", plain):
        if re.fullmatch(r"(?i)true|false|null|[\d.]+", name):  # which Hydra takes for no text
            raise ConfigError(_no_file(group, name, [file.stem for file in (conf_dir() / group).glob("*.yaml")]))
    return f"{group}={plain}"


_MEANT = {"true": "on", "yes": "on", "false": "off", "no": "off"}


def _no_file(group: str, name: str, options: Sequence[str]) -> str:
    """What to say of a name that is none of a group's."""
    meant = _MEANT.get(name.lower())
    hint = f"; did you mean {meant}?" if meant in options else nearest(name, options)
    if group == "model" and not hint:
        hint = f"; any other is model.path={name if '/' in name else 'OWNER/' + name}"
    return f"{group}: got {name!r}; accepted is {either(sorted(options))}{hint}"


def resolve(composed: DictConfig) -> Config:
    """A composed config with the device filled in, checked against the schema."""
    if OmegaConf.select(composed, "gpu.device") == "auto":
        composed = composed.copy()
        simulated = OmegaConf.select(composed, "engine.kind") == "simulator"  # on no device of this machine
        device = _calibrated(OmegaConf.select(composed, "engine.calibration")) if simulated else _device()
        found = OmegaConf.load(conf_dir() / "gpu" / f"{device}.yaml")
        asked = {
            key: value for key, value in composed.gpu.items() if value is not None and key not in ("name", "device")
        }
        with open_dict(composed):
            composed.gpu = OmegaConf.merge(found, asked)
    return validate(composed)


def _calibrated(calibration: str | None) -> str:
    """The device that `gpu=auto` simulates: that of the calibration, else the same everywhere."""
    try:
        device = str(json.loads(Path(calibration or "").read_bytes())["gpu"])
    except (OSError, ValueError, LookupError, TypeError):  # the engine's check says what is wrong with it
        return _SIMULATED_GPU
    return device if (conf_dir() / "gpu" / f"{device}.yaml").is_file() else _SIMULATED_GPU


def _device() -> str:
    devices = hardware.gpus()
    if not devices:
        return "cpu"
    if devices[0].group is None:
        raise ConfigError(
            f"gpu: got auto; found {devices[0].name}, which no file of conf/gpu describes: name the nearest with gpu="
        )
    return devices[0].group


@contextmanager
def plain_words() -> Iterator[None]:
    """Turns Hydra's errors about overrides and files into ConfigErrors that say what is accepted."""
    from hydra.errors import (
        ConfigCompositionException,
        HydraException,
        MissingConfigException,
        OverrideParseException,
    )
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except MissingConfigException as error:
        if not error.missing_cfg_file:
            raise ConfigError(str(error)) from None
        group, _, value = error.missing_cfg_file.partition("/")
        if not (conf_dir() / group).is_dir():  # one of Hydra's own
            group, _, value = error.missing_cfg_file.rpartition("/")
        raise ConfigError(_no_file(group, value, [str(option) for option in error.options or ()])) from None
    except ConfigCompositionException as error:
        unknown = re.search(r"Could not override '([^']+)'", str(error))
        cause = error.__cause__
        if several := re.search(r"Ambiguous value for argument '([^=]+)=(.*)'", str(error)):
            raise ConfigError(f"{several[1]}: got {several[2]}, several values; -m makes a study of them") from None
        if unknown and not (isinstance(cause, OmegaConfBaseException) and "not in struct" not in str(cause)):
            raise ConfigError(f"{unknown[1]}: {no_such_key(unknown[1])}") from None
        raise ConfigError(f"{error} {cause or ''}".strip()) from None
    except OverrideParseException as error:
        key, sign, value = str(error.override).lstrip("+").partition("=")
        if sign and re.fullmatch(r"[\w.+~/@]+", key):
            how = f"values stand between commas, and one that holds signs stands in quotes: {key}='\"…\"'"
            raise ConfigError(f"{key}: got {value}, which is not understood; {how}") from None
        raise ConfigError(f"{error.override}: {_NO_OVERRIDE}") from None
    except HydraException as error:
        raise ConfigError(str(error)) from None
    except YAMLError as error:
        raise ConfigError(f"a file of the config is not plain YAML: {error}") from None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise ConfigError(f"no file of the config has so long a name: {error.filename}") from None
    except ValueError as error:
        if "Config group override" in str(error):  # of Hydra's own groups; ours are looked at before
            raise ConfigError("hydra: got a number or null; accepted is hydra.KEY=VALUE or hydra/GROUP=NAME") from None
        if "in defaults" not in str(error):
            raise
        raise ConfigError(
            'a file of the config has defaults with an unquoted on, off, true or number; quote it, as in cache: "on"'
        ) from None
