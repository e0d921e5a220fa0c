import openai
import pytest

from draftwood import nano
from draftwood.llm import LLM
from tests.server.serving import serving


def load_nano() -> LLM:
    return LLM(str(nano.path()), tree_budget=16, max_num_seqs=16, max_model_len=1024, device="cpu", enable_prefix_caching=True)


@pytest.fixture(scope="session")
def server():
    """nano behind HTTP, for every test that leaves it as it was."""
    with serving(load_nano) as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made
