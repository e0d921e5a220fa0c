"""What the sanitizer's output is taken for."""

from __future__ import annotations

from tests.kernels import sanitize

REPORT = """
========= Error: Race reported between Read access at Acc<(int)9>::rescale()+0x2e50 in columns.cu:212
=========     and Write access at void score_role<(int)9>(const Task &, float, int)+0x210c0 in columns.cu:179 [20 hazards]
=========
========= Error: Race reported between Write access at copy16(unsigned int, const void *)+0x13a70 in common.cuh:84
=========     and Read access at ldmatrix4(unsigned int (&)[4], unsigned int)+0xa280 in common.cuh:103 [5952 hazards]
=========     and Read access at int4_weights(unsigned int (&)[4], unsigned int, const Factors &)+0xe6f0 in int4.cuh:69 [96 hazards]
=========
========= Error: Race reported between Read access at (anonymous namespace)::fold(float)+0x10 in combine.cu:3
=========     and Write access at mla_combine+0x20 in combine.cu:9 [1 hazards]
========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)
"""


def test_hazards_are_known_by_the_two_functions() -> None:
    found = sanitize.hazards(REPORT)
    assert found == {
        ("Acc::rescale", "score_role"), ("copy16", "ldmatrix4"), ("copy16", "int4_weights"), ("fold", "mla_combine"),
    }  # fmt: skip
    assert found - sanitize.REVIEWED["mla_attend"].keys() == {("copy16", "int4_weights"), ("fold", "mla_combine")}
    assert sanitize.hazards("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)") == set()


def test_reviewed_functions_are_there_still() -> None:
    kernels = sanitize.ROOT / "src/draftwood/kernels"
    folders = {"mla_attend": "mla_attention", "experts_joined": "moe_int4"}
    assert folders.keys() == sanitize.REVIEWED.keys()
    for entry, pairs in sanitize.REVIEWED.items():
        text = "".join(path.read_text() for path in (*(kernels / folders[entry]).glob("*.cu*"), kernels / "common.cuh"))
        assert f"{entry}(" in text
        for pair in pairs:
            assert pair == tuple(sorted(pair))
            for name in pair:
                assert f"{name.rsplit('::')[-1]}(" in text, (entry, name)
