"""What the project's files must not say: where they were written, and how."""

import re

import source_tree
from source_tree import ROOT

# One letter of each stands in brackets, so that this file passes its own test.
FORBIDDEN = {
    "a package registry's host": [
        r"pyp[i]\.org",
        r"pythonhoste[d]\.org",
        r"download\.pytorc[h]\.org",
        r"npmj[s]\.(org|com)",
        r"debia[n]\.org",
    ],
    "a path of one machine": ["/wor[k]/", "/venv[s]/", "/opt/pyp[i]", "/opt/wheel[s]", "/roo[t]/"],
    "how the work was organised": [
        "this workplac[e]",
        "issues sho[w]",
        r"\bissu[e] #?\d{1,2}\b",
        r"\b(design|cases|architectures|figures)\.m[d]\b",
    ],
}


def test_files_name_no_host_machine_or_workplace() -> None:
    found = []
    for name in source_tree.files():
        if (ROOT / name).is_symlink():
            continue
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for what, patterns in FORBIDDEN.items():
            for match in re.finditer("|".join(patterns), text, re.IGNORECASE):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{name}:{line}: {match[0]!r} is {what}")
    assert found == []
