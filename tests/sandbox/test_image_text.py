"""What Dockerfiles and apptainer definitions say, before anything runs: expectations written out by hand."""

import pytest

from jaxagent.config import ConfigError
from jaxagent.sandbox.images import bases, definition, dockerfile
from jaxagent.sandbox.images.context import Context

DOCKERFILE = """\
# syntax=docker/dockerfile:1

ARG V=12
FROM --platform=linux/amd64 debian:${V} AS Base
run a \\
  # a comment inside

  b \\
c
RUN ["echo", "two words"]
COPY --chmod=700 a b /to/
RUN <<-EOF cat > /x && <<"END" sh
\tone $A
\tEOF
two $A
END
LABEL a=b
CMD ["x"]
"""


def test_a_dockerfile_is_cut_into_instructions():
    found = dockerfile.parse(DOCKERFILE)
    assert [(i.name, i.rest, i.line) for i in found] == [
        ("ARG", "V=12", 3),
        ("FROM", "debian:${V} AS Base", 4),
        ("RUN", "a   b c", 5),
        ("RUN", '["echo", "two words"]', 10),
        ("COPY", "a b /to/", 11),
        ("RUN", '<<-EOF cat > /x && <<"END" sh', 12),
        ("NOTE", "LABEL a=b", 17),
        ("NOTE", 'CMD ["x"]', 18),
    ]
    assert found[1].flags == {"platform": "linux/amd64"} and found[4].flags == {"chmod": "700"}
    assert found[3].words == ("echo", "two words") and found[2].words == ()
    heredocs = [(h.name, h.text, h.expand) for h in found[5].heredocs]
    # The second body was not closed by a tab: "two $A" is of END.
    assert heredocs == [("EOF", "one $A\n", True), ("END", "two $A\n", False)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("RUN x\n", "has no FROM"),
        ("RUN x\nFROM a\n", "line 1: RUN stands before the first FROM"),
        ("FROM a\nRUNN x\n", "line 2: unknown instruction 'RUNN'. Did you mean 'RUN'?"),
        ("FROM a\nONBUILD RUN x\n", "line 2: ONBUILD acts in images built from this one"),
        ("FROM a\nCOPY --from=b x /y\n", "line 2: COPY --from is not supported"),
        ("FROM a\nRUN --mount=type=cache,target=/x y\n", "line 2: RUN --mount is not supported"),
        ("FROM a\nRUN\n", "line 2: RUN without arguments"),
        ("FROM a\nRUN cat <<END\nx\n", "line 2: the heredoc 'END' does not end"),
        ("FROM a\nSHELL bash\n", "line 2: SHELL needs a JSON list"),
        ("# syntax=docker/dockerfile:1\n# escape=`\nFROM a\n", "the escape directive must be"),
    ],
)
def test_what_a_dockerfile_must_not_have_is_named(text, said):
    with pytest.raises(ValueError) as failure:
        dockerfile.parse(text)
    assert str(failure.value).startswith(said)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$A-${A}-$AB", "1-1-"),
        ("'$A' \"$A\"", "'$A' \"1\""),
        ("\\$A ${N:-x$A} ${N-y} ${E:-z} ${E-z}", "\\$A x1 y z "),
        ("${A:+set} ${E:+set} ${E+set} ${N+set}", "set  set "),
        ("$ $1 a$", "$ $1 a$"),
    ],
)
def test_variables(text, expected):
    assert dockerfile.expand(text, {"A": "1", "E": ""}) == expected


def test_variables_that_are_not_understood():
    for text in ("${A%x}", "${", "${A:?no}"):
        with pytest.raises(ValueError, match=r"not supported|does not end"):
            dockerfile.expand(text, {"A": "1"})


def test_words_and_pairs():
    assert dockerfile.split("a 'b c' d\\ e \"f\\\"g\" ''") == ["a", "b c", "d e", 'f"g', ""]
    with pytest.raises(ValueError, match="does not end"):
        dockerfile.split("'a")
    values = {"P": "/bin"}
    assert dockerfile.pairs('A=1 B="x y" C=$P:/z D=$A', values) == [
        ("A", "1"),
        ("B", "x y"),
        ("C", "/bin:/z"),
        ("D", ""),
    ]
    assert dockerfile.pairs("ONE TWO= THREE=$P", values) == [("ONE", "TWO= THREE=/bin")]
    with pytest.raises(ValueError, match="has no value"):
        dockerfile.pairs("A", values)
    with pytest.raises(ValueError, match="must be name=value"):
        dockerfile.pairs("A=1 B", values)


DEFINITION = """\
Bootstrap: localimage
From: ./ubuntu_22.04.sif   # the published base

%files
    data.txt /srv/data.txt   # a comment
    /same/place

%environment
    export A=1

%post -c /bin/bash
    mkdir -p /home/user
    echo "%s" x

%runscript
    exec "$@"
%labels
    Author somebody
"""


def test_a_definition():
    found = definition.parse(DEFINITION)
    assert (found.bootstrap, found.source) == ("localimage", "./ubuntu_22.04.sif")
    assert found.files == (("data.txt", "/srv/data.txt"), ("/same/place", "/same/place"))
    assert found.post == '    mkdir -p /home/user\n    echo "%s" x' and found.shell == ("/bin/bash",)
    assert found.environment == "    export A=1" and found.notes == ("%runscript", "%labels")
    shebang = definition.parse("Bootstrap: docker\nFrom: a\n%post\n#!/bin/bash -eu\nx\n")
    assert shebang.shell == ("/bin/bash", "-eu")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("From: a\n", "Bootstrap '' is not supported"),
        ("Bootstrap: yum\n", "Bootstrap 'yum' is not supported"),
        ("Bootstrap: docker\n", "Bootstrap 'docker' names no From"),
        ("Bootstrap: docker\nFrm: a\n", "line 2: unknown header 'Frm'. Did you mean 'from'?"),
        ("Bootstrap: docker\nFrom: a\n%setup\nx\n", "line 3: %setup is not supported"),
        ("Bootstrap: docker\nFrom: a\n%files from b\n", "line 3: '%files from b' is not supported"),
        ("Bootstrap: docker\nFrom: a\n%post\nx\nBootstrap: docker\n", "line 5: a second Bootstrap"),
        ("Bootstrap: docker\nFrom: a\n%files\na b c\n", "%files: 'a b c' must be a source and a target"),
        ("Bootstrap: docker\nFrom: a\n%files\na b\n", "%files: 'a b' needs an absolute target"),
        ("Bootstrap: docker\nFrom: a\n%post\necho {{ X }}\n", "%post has the template variable {{ X }}"),
    ],
)
def test_what_a_definition_must_not_have_is_named(text, said):
    with pytest.raises(ValueError) as failure:
        definition.parse(text)
    assert str(failure.value).startswith(said)


def test_the_table_of_bases(tmp_path):
    table = bases.parse(
        ("debian:12=host", "docker.io/library/python=debootstrap:bookworm@http://m/d", f"u={tmp_path}#x")
    )
    assert list(table) == [
        ("debian:12", "host"),
        ("python:latest", "debootstrap:bookworm@http://m/d"),
        ("u:latest", f"{tmp_path}#x"),
    ]
    assert bases.normal("docker://ubuntu:22.04@sha256:" + "0" * 64) == "ubuntu:22.04"
    assert bases.normal("localhost:5000/a/b") == "localhost:5000/a/b:latest" and bases.normal("x.sif") == "x.sif"
    for entry, said in (
        ("debian", "must be NAME=SOURCE"),
        ("a=debootstrap:", "must be debootstrap:SUITE"),
        ("a=/nowhere", "no such folder or tar"),
        ("a=hots", "Did you mean 'host'?"),
    ):
        with pytest.raises(ConfigError, match=said):
            bases.parse((entry,))


def test_what_copy_may_take(tmp_path):
    folder = tmp_path / "context"
    for name in ("a.txt", "b.txt", "sub/c.txt", "sub/deep/d.md", "secret/key", "secret/public"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (tmp_path / "outside").write_text("no")
    (folder / "out").symlink_to(tmp_path / "outside")
    (folder / "up").symlink_to("..")
    (folder / "sub/link").symlink_to("c.txt")
    (folder / "sub/away").symlink_to("/etc/passwd")
    context = Context(folder, "# comment\nsecret\n!secret/public\n**/*.md\n")
    names = lambda pattern: [p.as_posix() for p in context.find(pattern)]  # noqa: E731
    assert (
        names("*.txt") == ["a.txt", "b.txt"]
        and names("./[!a].txt") == ["b.txt"]
        and names("s?b/c.txt") == ["sub/c.txt"]
    )
    for pattern in ("../outside", "sub/../../x", "out", "up/outside", "none", "*.none", "secret/key", "sub/deep/d.md"):
        with pytest.raises(ValueError):
            context.find(pattern)
    found = {i.path: (i.kind, i.data or i.read()) for i in context.items(context.find("sub")[0])}
    assert found == {  # a link is copied as one, wherever it leads: it is followed in the image alone
        "away": ("link", b"/etc/passwd"),
        "c.txt": ("file", b"sub/c.txt"),
        "deep": ("directory", b""),
        "link": ("link", b"c.txt"),
    }
    assert {i.path for i in context.items(context.find("secret/public")[0])} == {""}
    with pytest.raises(ValueError, match="leads out"):
        context.items(context.find("sub")[0], follow=True)
