"""Adds up the JUnit files of a folder; the last line is "N passed, N failed"; exits 1 on any failure.

usage: count_results.py FOLDER [PROGRAM-THAT-FAILED ...]
A program that failed without a failed case in its JUnit file (a crash) counts as one failure.
"""
import collections
import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def count(file: pathlib.Path) -> tuple[int, int, int]:
    """Passed, failed and skipped ones; says why those were skipped."""
    passed = failed = skipped = 0
    reasons = collections.Counter()
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif (reason := case.find("skipped")) is not None or case.get("status") == "notrun" or case.get("result") == "skipped":
            skipped += 1
            # pytest runs many files as one program and names each in its cases; GoogleTest's names are groups of tests.
            part = case.get("classname").split(".")[-1] if file.stem.startswith(("reference", "paths")) else file.stem
            reasons[part, " ".join((reason.get("message") or "").split()) if reason is not None else "disabled"] += 1
        else:
            passed += 1
    for (part, why), times in reasons.items():
        print(f"{times} skipped of {part}: {why}")
    return passed, failed, skipped


def main() -> int:
    folder, crashed = pathlib.Path(sys.argv[1]), set(sys.argv[2:])
    totals = [0, 0, 0]
    for file in sorted(folder.glob("*.xml")):
        counts = count(file)
        if counts[1]:
            crashed.discard(file.stem)
        totals = [total + more for total, more in zip(totals, counts)]
    passed, failed, skipped = totals
    failed += len(crashed)
    if skipped:
        print(f"{skipped} skipped")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
