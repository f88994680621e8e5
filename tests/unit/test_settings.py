from pathlib import Path

import pytest

from trainer.errors import SettingsError
from trainer.settings import RowOptimizer, ServingSettings, Settings

MINIMAL = """
tables: {user: {width: 8}}
features: {user: {kind: categorical}}
"""


def load(
    tmp_path: Path, text: str = MINIMAL, environment: dict[str, str] | None = None, **overrides: object
) -> Settings:
    path = tmp_path / "livebed.yaml"
    path.write_text(text)
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return Settings.load(path, dotted, environment or {})


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    text = MINIMAL + "serving: {http_port: 1111, grpc_port: 2222}\n"
    environment = {"LIVEBED_SERVING__HTTP_PORT": "3333", "LIVEBED_SERVING__ADMIN_PORT": "4444"}
    settings = load(tmp_path, text, environment, serving__admin_port=5555)
    serving = settings.serving
    assert (serving.grpc_port, serving.http_port, serving.admin_port, serving.workers) == (2222, 3333, 5555, 1)


def test_the_redis_url_has_its_well_known_name(tmp_path: Path) -> None:
    settings = load(tmp_path, environment={"LIVEBED_REDIS_URL": "redis://localhost:6379/0"})
    assert settings.stream.url == "redis://localhost:6379/0"


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("features: {u: {kind: categorical}}", "tables", "this key is required"),
        (MINIMAL + "serving: {http_port: high}", "serving.http_port", "valid integer"),
        (MINIMAL + "servnig: {}", "servnig", "no such key"),
        ("tables: {user: {width: 0}}\nfeatures: {user: {kind: categorical}}", "tables.user.width", "greater than"),
        (MINIMAL + "serving: {host: 0.0.0.0}", "serving", "not a loopback address"),
        (MINIMAL + "serving: {host: '::'}", "serving", "not a loopback address"),
        (MINIMAL + "serving: {host: 0.0.0.0, tokens_file: t}", "serving", "in clear text: set tls"),
        (MINIMAL + "serving: {admin_host: 0.0.0.0, insecure_no_auth: true}", "serving", "needs tokens_file"),
        (MINIMAL + "serving: {admin_host: 10.1.2.3, tokens_file: t}", "serving", "in clear text: set tls"),
        (MINIMAL + "serving: {tokens_file: t, insecure_no_auth: true}", "serving", "contradict"),
        (MINIMAL + "serving: {tls: {cert_file: c}}", "serving.tls.key_file", "required"),
        ("[1, 2]", "livebed.yaml", "a YAML mapping"),
        ("a: [", "livebed.yaml", "YAML"),
    ],
)
def test_a_bad_value_names_its_field_and_what_was_wanted(tmp_path: Path, text: str, field: str, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, text)
    assert field in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "serving",
    [
        "{host: 0.0.0.0, insecure_no_auth: true}",
        "{host: 0.0.0.0, tokens_file: t, tls: {cert_file: c, key_file: k}}",
        "{host: 0.0.0.0, admin_host: 0.0.0.0, tokens_file: t, insecure_plaintext: true}",
        "{host: 127.8.9.1, tokens_file: t}",
    ],
)
def test_a_public_address_is_had_by_who_says_what_protects_it(tmp_path: Path, serving: str) -> None:
    load(tmp_path, MINIMAL + f"serving: {serving}")


def test_the_commands_own_variables_are_no_settings(tmp_path: Path) -> None:
    load(tmp_path, environment={"LIVEBED_TOKEN": "t", "LIVEBED_CA_FILE": "c", "LIVEBED_ADMIN_URL": "u"})


def test_a_misspelt_environment_variable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="htp_port"):
        load(tmp_path, environment={"LIVEBED_SERVING__HTP_PORT": "1"})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.yaml"):
        Settings.load(tmp_path / "nowhere.yaml", {}, {})


def test_settings_survive_the_way_to_a_child_process(tmp_path: Path) -> None:
    settings = load(tmp_path, MINIMAL.replace("8", "8, budget_bytes: 64MiB"))
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_a_key_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "livebed.yaml"
    file.write_text("tables: {a: {}}\nfeatures: {a: {kind: categorical}}\ntables: {b: {}}\n")
    with pytest.raises(SettingsError, match="'tables' is given twice"):
        Settings.load(file, environment={})


def test_a_file_that_is_not_utf8_and_a_number_that_is_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "livebed.yaml"
    file.write_bytes(b"tables: \xff\xfe")
    with pytest.raises(SettingsError, match="UTF-8"):
        Settings.load(file, environment={})
    file.write_text("tables: {a: {}}\nfeatures: {a: {kind: categorical}}\nmodel: {optimizer: {lr: .inf}}\n")
    with pytest.raises(SettingsError, match=r"model\.optimizer\.lr"):
        Settings.load(file, environment={})


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_only_adagrad_decays(kind: str) -> None:
    with pytest.raises(ValueError, match=f"{kind} has none that may decay"):
        RowOptimizer.model_validate({"kind": kind, "decay": 0.5})
    assert RowOptimizer.model_validate({"kind": "adagrad", "decay": 0.5}).decay == 0.5


def test_two_listeners_cannot_share_a_port() -> None:
    with pytest.raises(ValueError, match="must differ, got 9000, 8081, 9000"):
        ServingSettings.model_validate({"http_port": 9000, "grpc_port": 9000})
    assert ServingSettings.model_validate({"http_port": 0, "admin_port": 0, "grpc_port": 0}).http_port == 0
