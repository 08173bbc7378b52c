"""Find, prune and prove rules, and write the file that the package reads: scripts/rules [--check]."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from hashlib import blake2b

from graph.substitutions.rules import PATH
from graph.substitutions.terms import VARIABLE, subterms
from scripts.substitutions.enumeration import enumerate_family, equal_graphs
from scripts.substitutions.families import COMPOSED, FAMILIES
from scripts.substitutions.offering import offered
from scripts.substitutions.proofs import prove
from scripts.substitutions.pruning import SETTINGS, Candidate, canonical, generalized, read_candidate
from scripts.substitutions.terms import conditions


def main() -> int:
    """Write the rules, or with --check compare them with the file; print counts and seconds."""
    parser = argparse.ArgumentParser(prog="scripts/rules", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the file in place of writing it")
    options = parser.parse_args()
    began = time.monotonic()
    text, counts = _found()
    for title, count in counts.items():
        print(f"{title:40} {count:8,}")
    print(f"{'seconds':40} {time.monotonic() - began:8.0f}")
    if options.check:
        same = text == PATH.read_text(encoding="utf-8")
        print(
            f"{PATH.name}: {'as found' if same else 'differs from what was found; write it anew by scripts/rules'}"
        )
        return 0 if same else 1
    PATH.write_text(text, encoding="utf-8")
    return 0


def _found() -> tuple[str, Counter[str]]:
    counts: Counter[str] = Counter()
    renamed: dict[str, Candidate] = {}
    pruned: dict[str, Candidate] = {}
    for family in FAMILIES:
        found = enumerate_family(family)
        counts["graphs"] += found.graphs
        for source, target in equal_graphs(found):
            counts["candidates of equal fingerprints"] += 1
            candidate = canonical(Candidate(source, target, found.types))
            renamed.setdefault(_key(candidate), candidate)
        print(f"{family.name:40} {found.graphs:8,} graphs, {len(renamed):6,} candidates so far", flush=True)
    for given in COMPOSED:
        candidate = canonical(read_candidate(*given))
        renamed.setdefault(_key(candidate), candidate)
    counts["candidates given"] = len(COMPOSED)
    counts["after renaming"] = len(renamed)
    for candidate in renamed.values():
        if not candidate.holds(SETTINGS):
            continue
        counts["confirmed on other extents and degrees"] += 1
        general = generalized(candidate)
        if general is not None:
            general = canonical(general)
            pruned.setdefault(_key(general), general)
    counts["after pruning common subgraphs"] = len(pruned)
    proven: dict[str, tuple[Candidate, list[str]]] = {}
    for key, candidate in sorted(pruned.items()):
        if not candidate.holds(SETTINGS):
            continue
        proofs = [
            prove(first, second, candidate.types)
            for first, second in zip(candidate.source, candidate.target, strict=True)
        ]
        used = [proof for proof in proofs if proof is not None]
        if len(used) == len(proofs):
            proven[key] = candidate, sorted({name for proof in used for name in proof})
        else:
            counts["unproven, dropped"] += 1
            print(f"unproven: {key}")
    counts["rules, proven"] = len(proven)
    directions = offered(
        [(_name(key, one), one.source, one.target, one.types) for key, (one, _) in proven.items()]
    )
    counts["directions offered to networks"] = sum(map(len, directions.values()))
    entries = [
        _entry(_name(key, candidate), candidate, properties, directions)
        for key, (candidate, properties) in proven.items()
    ]
    lines = ",\n".join(json.dumps(entry) for entry in sorted(entries, key=lambda entry: str(entry["name"])))
    return f'{{"rules": [\n{lines}\n]}}\n', counts


def _key(candidate: Candidate) -> str:
    sides = (" ; ".join(map(str, side)) for side in (candidate.source, candidate.target))
    return f"{' = '.join(sides)} where {', '.join(f'{name}: {type_}' for name, type_ in candidate.types.items())}"


def _name(key: str, candidate: Candidate) -> str:
    terms = (*candidate.source, *candidate.target)
    kinds = sorted({part.kind for term in terms for part in subterms(term) if part.kind != VARIABLE})
    return f"{'-'.join(kinds)}-{blake2b(key.encode(), digest_size=4).hexdigest()}"


def _entry(
    name: str, candidate: Candidate, properties: list[str], directions: dict[str, list[str]]
) -> dict[str, object]:
    return {
        "name": name,
        "source": list(map(str, candidate.source)),
        "target": list(map(str, candidate.target)),
        "variables": {name: str(type_) for name, type_ in candidate.types.items()},
        "conditions": list(conditions((*candidate.source, *candidate.target), candidate.types)),
        "properties": properties,
        **({"offered": directions[name]} if name in directions else {}),
    }


if __name__ == "__main__":
    raise SystemExit(main())
