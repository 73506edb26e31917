"""The corpus of packages: what its readers keep of small made-up files, and what counts as a repetition."""

import gzip
import struct
import zlib

import pytest

from experiments.corpus_markup import html, man, pod
from experiments.corpus_text import Deduplicator, dictionary, is_english, paragraphs, plain, r_strings, sword


def test_html_keeps_the_text_of_the_main_part():
    page = """<html><head><title>T</title><script>if (a < b) x()</script></head><body>
    <div class="sphinxsidebar"><p>Previous topic</p></div>
    <div role="main"><h1>Of  Ships<a class="headerlink" href="#s">¶</a></h1>
    <p>The <em>old</em> ship &amp; her\ncrew.</p><ul><li><p>first</p></li><li>second</li></ul>
    <table><tr><td>12</td></tr></table><pre>a = 1\nb = 2</pre><pre>%s</pre>
    <p>A harbour.</p> <p>It is far. For more, see .</p></div><footer>Copyright</footer></body></html>"""
    (text,) = html(page % "\n".join("long" * 9))
    want = ["Of Ships", "The old ship & her crew.", "- first", "- second", "a = 1\nb = 2", "A harbour.", "It is far. "]
    assert [p.rstrip("¶") for p in text.split("\n\n")] == want


def test_html_reads_docbook():
    (text,) = html("<chapter><title>The <app>Caja</app></title><info>x</info><para>Choose &name; it.</para></chapter>")
    assert text == "The Caja\n\nChoose  it."


def test_html_recovers_from_a_skipped_tag_that_nobody_closes_inside():
    (text,) = html("<div class='toc'><p>Contents<b>bold</div><p>Text.")
    assert text == "Text."


def test_man_page_without_macros_tables_and_synopsis():
    page = r""".\" a comment
.TH KEEP 2 2024-01-01
.SH NAME
keep \- guard a \fIlight\fP
.SH SYNOPSIS
.B int keep(void);
.SH DESCRIPTION
The call
.BR keep (2)
returns \(lqone\(rq.
.PP
.TS
l l.
1	2
.TE
It \*(Aqsleeps\*(Aq.
.EX
keep(light);
.EE
.SH SEE ALSO
.BR sleep (3)
"""
    (text,) = man(page)
    assert paragraphs(text) == [
        "NAME",
        "keep - guard a light",
        "DESCRIPTION",
        "The call keep(2) returns “one”.",
        "It 'sleeps'.",
        "keep(light);",
    ]


def test_pod_without_commands_and_codes():
    text = "code\n\n=encoding utf8\n\n=head1 A B<bold> name\n\nSee L<the page|perlop> and C<< a->b >>, E<lt>x.\n\n"
    text += "=begin html\n\nnot this\n\n=end html\n\n=for me nor this\n\nBut this.\n\n=cut\n\nmore code"
    assert list(pod(text)) == ["A bold name\n\nSee the page and a->b, <x.\n\nBut this."]


def test_dictionary_entries_lose_pronunciation_etymology_and_braces():
    text = (
        '00-database-info\n   About.\n\nAeon \\[AE]"on\\ ([=e]"[o^]n), n. [L. aeon, fr. Gr. ?.]\n   1. An age of the\n'
    )
    text += (
        '      {universe}. [Obs.]\n      [1913 Webster]\n\nAerie \\A"e*rie\\, n.\n   A nest. [R.]\n   [1913 Webster]\n'
    )
    raw = gzip.compress(text.encode())
    assert list(dictionary(size=10)([("x.dict.dz", raw)])) == [
        "Aeon, n. 1. An age of the universe. [Obs.]",
        "Aerie, n. A nest. [R.]",
    ]


def test_plain_text_is_cut_at_headings_and_unwrapped_unless_it_is_verse():
    line = "a line of prose that is long enough to have been broken by hand"
    text = f"CHAPTER 1\n\n{line}\n{line}\n\nCHAPTER 2\n\nO verse\nof mine\n"
    got = list(plain("CHAPTER", size=1000)([("a.txt", text.encode())]))
    assert got == [f"CHAPTER 1\n\n{line} {line}", "CHAPTER 2\n\nO verse\nof mine"]


@pytest.mark.parametrize("form", ["<IIH", "<III"])
def test_sword_modules(form):
    verses = [b"<chapter n='1'/><w>In</w> the<note n='a'><b>x</b>: or</note> beginning", b"", b"two<l/><l/>three"]
    block = b"".join(verses)
    packed = zlib.compress(block)
    # The last two entries share their place, as verses do that share a comment.
    places = [(0, len(verses[0])), (0, 0), (len(verses[0]), len(verses[2])), (len(verses[0]), len(verses[2]))]
    files = [
        ("m/ot.bzs", struct.pack("<III", 0, len(packed), len(block))),
        ("m/ot.bzv", b"".join(struct.pack(form, 0, at, size) for at, size in places)),
        ("m/ot.bzz", packed),
    ]
    assert list(sword(files)) == ["In the beginning\ntwo\nthree"]
    files[1] = ("m/ot.bzv", struct.pack(form, 0, 9, len(block)))
    with pytest.raises(ValueError, match="that fits no text"):
        list(sword(files))


def test_strings_of_r():
    lines = ["CHAPTER 1", "", "It is a truth", "CHAPTER 2", "He"]
    data = b"X\n" + b"".join(struct.pack(">ii", 0x00040009, len(x)) + x.encode() for x in lines)
    packed = zlib.compress(data)
    raw = struct.pack(">i", len(data)) + packed
    assert list(r_strings([("a.rdb", raw + raw)])) == ["CHAPTER 1\n\nIt is a truth", "CHAPTER 2\nHe"] * 2


def test_paragraphs_that_are_no_text_go_and_unicode_is_one():
    text = "Cafe\u0301 au\u00a0lait \n\n\n\n| 12 | 13 | 14.5 |\n\n-----\n\nsoft\u00adly\x07"
    assert paragraphs(text) == ["Café au lait", "softly"]


def test_english_is_told_from_lists_and_other_languages():
    assert is_english("The keeper of the light told us that the old story was not to be read in the dark. " * 5)
    assert not is_english("apple pear plum quince " * 50)
    assert not is_english("Der Wärter des Leuchtturms sagte uns, dass die Geschichte wahr ist. " * 20)


def test_repeated_paragraphs_go_whatever_their_case_and_spaces():
    known = Deduplicator()
    first, second = "A long paragraph, of the kind that may not repeat. " * 3, "Another one, as long as the first. " * 4
    assert known.new_paragraphs([first, second, "ACT I"]) == [first, second, "ACT I"]
    assert known.new_paragraphs([first.upper().replace(" ", "\n"), "ACT I", second[:-9]]) == ["ACT I", second[:-9]]
