"""Calls of one stock client in Python: `client.py openai`, `anthropic` or `langchain_openai`."""

import os
import sys
from collections.abc import Callable
from functools import partial

BASE = os.environ["POORWILL_BASE"]
KEY = os.environ["POORWILL_KEY"]
MESSAGES = [{"role": "user", "content": "Tell me of trees."}]


def call(name: str, run: Callable[[], object]) -> None:
    """Prints what became of a call. It has to return something true."""
    try:
        answer = run()
    except Exception as error:
        print(f"failed {name}: {type(error).__name__}: {str(error)[:300]}".replace("\n", " "))
        return
    print(f"ok {name}" if answer else f"failed {name}: it gave {answer!r}")


def with_openai() -> None:
    import openai

    client = openai.OpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0)
    call("models.list", lambda: {"amber", "birch"} <= {one.id for one in client.models.list()})
    call("models.retrieve", lambda: client.models.retrieve("amber").id == "amber")
    chat = client.chat.completions.create

    def answer(model: str) -> object:
        return chat(model=model, messages=MESSAGES, max_tokens=8).choices[0].message.content

    def stream(model: str) -> str:
        events = chat(model=model, messages=MESSAGES, max_tokens=8, stream=True)
        return "".join(event.choices[0].delta.content or "" for event in events if event.choices)

    for model in ["amber", "birch", "amber-alias"]:
        call(f"chat {model}", partial(answer, model))
        call(f"stream {model}", partial(stream, model))
    completion = partial(client.completions.create, model="amber", prompt="Trees", max_tokens=8)
    call("completions", lambda: completion().choices[0].text)
    response = partial(client.responses.create, model="amber", input="Trees", max_output_tokens=8)
    call("responses", lambda: response().output_text)

    def unknown() -> bool:
        try:
            client.chat.completions.create(model="nobody", messages=MESSAGES)
        except openai.NotFoundError as error:
            return error.code == "model_not_found"
        return False

    call("unknown model", unknown)

    def keyless() -> bool:
        try:
            openai.OpenAI(base_url=f"{BASE}/v1", api_key="wrong", max_retries=0).models.list()
        except openai.AuthenticationError:
            return True
        return False

    call("wrong key", keyless)


def with_anthropic() -> None:
    import anthropic

    for way, client in [
        ("api_key", anthropic.Anthropic(base_url=BASE, api_key=KEY, max_retries=0)),
        ("auth_token", anthropic.Anthropic(base_url=BASE, api_key=None, auth_token=KEY, max_retries=0)),
    ]:

        def unknown(client: anthropic.Anthropic = client) -> bool:
            try:
                client.messages.create(model="nobody", max_tokens=8, messages=MESSAGES)
            except anthropic.NotFoundError as error:
                return error.body["type"] == "error" and "nobody" in error.body["error"]["message"]
            return False

        call(f"unknown model, {way}", unknown)


def with_langchain() -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="birch", base_url=f"{BASE}/v1", api_key=KEY, max_retries=0, max_tokens=8)
    call("invoke", lambda: chat.invoke("Tell me of trees.").content)
    call("stream", lambda: "".join(str(part.content) for part in chat.stream("Tell me of trees.")))


{"openai": with_openai, "anthropic": with_anthropic, "langchain_openai": with_langchain}[sys.argv[1]]()
