"""The hardware page in a browser: FSDP on, blocks detected and applied; the builder's JSON."""

from smalti_webui.configs.drafts import Draft


def test_fsdp_is_switched_on_and_the_detected_blocks_are_applied(page, served, draft_in):
    draft = draft_in(served.settings)
    page.goto(f"/hardware/{draft.id}")
    page.locator("#mode-fsdp2").check()
    page.get_by_role("button", name="Detect blocks…").click()
    block = page.get_by_role("checkbox", name="Wrap ToyBlock")
    block.wait_for(timeout=60_000)
    flag = page.locator("#blocks-flag")
    assert flag.inner_text() == "--fsdp_transformer_layer_cls_to_wrap=ToyBlock"
    block.uncheck()
    page.get_by_text("Nothing is selected").wait_for()
    block.check()
    page.get_by_text("--fsdp_transformer_layer_cls_to_wrap=ToyBlock").wait_for()
    page.get_by_role("button", name="Apply", exact=True).click()
    field = page.get_by_label("fsdp_transformer_layer_cls_to_wrap")
    field.wait_for()
    assert field.input_value() == "ToyBlock"
    values = Draft.load(served.settings, draft.id).values
    assert (values["fsdp_enable"], values["fsdp_transformer_layer_cls_to_wrap"]) == (True, ["ToyBlock"])
    assert page.locator("#toasts").inner_text().startswith("fsdp_transformer_layer_cls_to_wrap is ToyBlock")


def test_the_builder_gives_the_json_of_the_command_line_and_names_the_line_of_an_error(page, served, draft_in):
    draft = draft_in(served.settings, 'model_family = "toy"\ndeepspeed_config = \'{"zero_optimization": {"stage": 2}}\'\n')
    page.goto(f"/hardware/{draft.id}")
    page.get_by_role("button", name="Builder…").click()
    text = page.get_by_label("deepspeed_config", exact=True)
    text.wait_for(timeout=30_000)
    with page.expect_response("**/deepspeed/form"):
        page.get_by_label("ZeRO stage").select_option("3")
    page.wait_for_function("() => document.getElementById('builder-text').value.includes('\"stage\": 3')")
    text.fill('{\n  "zero_optimization": {\n    "stage": 5}}')
    page.get_by_role("button", name="line 3").click(timeout=30_000)
    selected = "document.activeElement.value.slice(document.activeElement.selectionStart, document.activeElement.selectionEnd)"
    assert page.evaluate(selected) == '    "stage": 5}}'
