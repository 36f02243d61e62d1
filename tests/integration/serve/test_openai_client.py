"""The official OpenAI client against ``gated-serving serve``."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch
from process_ends import assert_all_end
from transformers import AutoModelForCausalLM, AutoTokenizer

from gated_serving.llm.serving import RunningServer, running_server

pytestmark = pytest.mark.slow
KEY = "a-key-of-ours"
MODEL = "tiny-gated"


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[RunningServer]:
    with running_server(tiny_folder, ["--api-key", KEY]) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.api_url, api_key=KEY, max_retries=0, timeout=120) as client:
        yield client


def test_models_have_the_folders_name_and_no_path(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_greedy_completion_is_what_transformers_generates(client: openai.OpenAI, tiny_folder: Path) -> None:
    prompt = "def save_tokenizer(folder"
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_folder)
    ids = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        expected = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
    completion = client.completions.create(model=MODEL, prompt=prompt, max_tokens=16, temperature=0)
    assert completion.choices[0].text == tokenizer.decode(expected, skip_special_tokens=True)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == len(expected)


def test_streamed_completion_adds_up_to_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="import os", max_tokens=12, temperature=0)
    parts = client.completions.create(model=MODEL, prompt="import os", max_tokens=12, temperature=0, stream=True)
    texts = [part.choices[0].text for part in parts]
    assert len(texts) > 1
    assert "".join(texts) == whole.choices[0].text


def test_chat_and_its_stream(client: openai.OpenAI) -> None:
    messages: list = [{"role": "system", "content": "Write code."}, {"role": "user", "content": "A function."}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0)
    parts = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert whole.choices[0].message.role == "assistant"
    assert text == whole.choices[0].message.content
    assert text


def test_logprobs_of_the_chosen_and_the_best_tokens(client: openai.OpenAI) -> None:
    completion = client.completions.create(model=MODEL, prompt="import", max_tokens=4, temperature=0, logprobs=3)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.token_logprobs) == 4
    for chosen, best in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert chosen == pytest.approx(max(best.values()), abs=1e-6)  # greedy takes the most likely token


def test_chat_logprobs(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "import"}],
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(token.top_logprobs) for token in logprobs.content] == [2, 2, 2]


def test_n_gives_as_many_choices_and_they_differ(client: openai.OpenAI) -> None:
    completion = client.completions.create(model=MODEL, prompt="import", max_tokens=16, temperature=1.5, n=3, seed=1)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert len({choice.text for choice in completion.choices}) > 1


def test_stop_ends_before_the_stop_string(client: openai.OpenAI) -> None:
    free = client.completions.create(model=MODEL, prompt="import os", max_tokens=24, temperature=0).choices[0].text
    stop = free[6:8]
    completion = client.completions.create(model=MODEL, prompt="import os", max_tokens=24, temperature=0, stop=[stop])
    assert completion.choices[0].finish_reason == "stop"
    assert completion.choices[0].text == free[: free.index(stop)]


def test_a_seed_repeats_a_sample_and_another_does_not(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str:
        completion = client.completions.create(
            model=MODEL, prompt="import", max_tokens=24, temperature=1.0, seed=seed, extra_body={"ignore_eos": True}
        )
        return completion.choices[0].text

    assert sample(11) == sample(11)
    assert sample(11) != sample(12)


def test_json_schema_output_holds_to_the_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ready": {"type": "boolean"}, "level": {"enum": ["low", "high"]}},
        "required": ["ready", "level"],
        "additionalProperties": False,
    }
    completion = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "State?"}],
        max_tokens=200,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "state", "schema": schema, "strict": True}},
    )
    content = completion.choices[0].message.content
    assert content is not None
    state = json.loads(content)
    assert isinstance(state["ready"], bool)
    assert state["level"] in {"low", "high"}
    assert set(state) == {"ready", "level"}


def test_without_the_key_nobody_gets_in(server: RunningServer) -> None:
    with openai.OpenAI(base_url=server.api_url, api_key="wrong", max_retries=0, timeout=60) as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with pytest.raises(openai.AuthenticationError):
            stranger.completions.create(model=MODEL, prompt="import", max_tokens=1)


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="import", max_tokens=1)


def test_a_prompt_longer_than_the_context_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt=[1] * 600, max_tokens=1)


def test_the_ready_message_names_the_address_and_a_curl_line(server: RunningServer) -> None:
    printed = server.log_path.read_text()
    assert f"at {server.url}" in printed
    assert f"curl {server.url}/v1/completions" in printed


def test_sigterm_stops_it_cleanly(server: RunningServer) -> None:
    """The last of this file: it ends the server that the others asked."""
    below = psutil.Process(server.process.pid).children(recursive=True)
    assert len(below) >= 2  # the API and its engine
    assert server.stop(signal.SIGTERM) == 0
    assert_all_end(below)
    assert "Traceback" not in server.log_path.read_text()
