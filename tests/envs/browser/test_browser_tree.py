"""The tree against Chromium's own accessibility tree: the same controls, by role and name, in the same order."""

from jaxagent.envs.browser import tree
from jaxagent.envs.browser.page import TREE
from tests.envs.browser.playing import Play

SAME = {"button", "link", "checkbox", "radio", "slider", "spinbutton", "searchbox", "tab", "menuitem", "switch"}
OURS = {"password": "textbox", "file": "button", "date": "date", "listbox": "listbox", "combobox": "combobox"}
CONTROLS = """<h1>Head <em>line</em></h1>
<button>Plain</button> <button aria-label=Labelled>x</button> <button title=Titled></button>
<button><img alt=Pictured src="data:,"></button> <input type=submit> <input type=reset value=Again>
<input type=button value=Pressed> <input type=image alt=Shot src="data:,"> <a href=/>Linked <b>twice</b></a>
<a href=/><svg width=9 height=9><title>Drawn</title></svg></a> <a>No link</a>
<label>Wrapped <input></label> <label for=f>For</label><input id=f> <input placeholder=Held>
<span id=a>First</span><span id=b>second</span><input aria-labelledby="a b">
<label><input type=checkbox checked> Ticked</label> <label><input type=radio name=r> One</label>
<input type=range aria-label=Loud> <input type=number aria-label=Count> <input type=search aria-label=Find>
<textarea aria-label=Long></textarea> <select aria-label=One><option>A<option>B</select>
<select multiple aria-label=Many><option>A<option>B</select> <div role=button>Acting</div>
<div role=tab aria-selected=true>Tabbed</div> <div role=checkbox aria-checked=true>Box</div>
<div role=switch aria-label=Light>o</div> <div contenteditable role=textbox aria-label=Edit>e</div>
<details><summary>More</summary><button>Folded</button></details>
<button hidden>Hidden</button><button style=display:none>None</button><button style=visibility:hidden>Invisible</button>
<div aria-hidden=true><button>For eyes</button></div><button disabled>Off</button>
<div id=host></div><script>host.attachShadow({mode: 'open'}).innerHTML = '<button>In the shade</button>'</script>
<fieldset disabled><input aria-label=Within></fieldset><iframe srcdoc='<button>Framed</button>'></iframe>"""


async def chromiums(page):
    """(role, name) of the controls in the browser's own accessibility tree, in its order."""
    session, there = page._session, []
    await session.send("Accessibility.enable")
    frames = [page._frame, *(f["frame"]["id"] for f in (await _frames(session)))]
    for frame in frames:
        nodes = (await session.send("Accessibility.getFullAXTree", {"frameId": frame}))["nodes"]
        by_id, order = {node["nodeId"]: node for node in nodes}, []

        def walk(number, by_id=by_id, order=order):
            if number in by_id:
                order.append(by_id[number])
                for child in by_id[number].get("childIds", ()):
                    walk(child)

        walk(next(node["nodeId"] for node in nodes if "parentId" not in node))
        for node in order:
            role = node.get("role", {}).get("value", "")
            role = {"ComboBoxSelect": "combobox", "ComboBoxMenuButton": "combobox", "DisclosureTriangle": "button"}.get(
                role, role
            )
            if not node.get("ignored") and role in SAME | {"textbox", "combobox", "listbox"}:
                there.append((role, tree.clean(node.get("name", {}).get("value", ""))))
    return there


async def _frames(session):
    return (await session.send("Page.getFrameTree"))["frameTree"].get("childFrames", [])


def ours(page):
    items = page.run(page.attempt._page._in_tree(TREE, most=500, look=50_000))["items"]
    return [(OURS.get(role, role), tree.clean(name)) for role, name, *_ in items if role in SAME | {"textbox", *OURS}]


def test_controls_are_those_of_the_accessibility_tree(browsers):
    with Play(browsers, CONTROLS, height=3_000) as play:
        theirs = play.run(chromiums(play.attempt._page))
        assert ours(play) == theirs
        assert len(theirs) > 30
