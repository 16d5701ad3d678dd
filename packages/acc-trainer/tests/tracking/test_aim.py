"""What the Aim tracker calls."""

from __future__ import annotations

import pytest

from acc_trainer import Accelerator, AimTracker


def test_a_run_reaches_aim_in_order(stand_in, caplog):
    class Text:
        def __init__(self, text):
            self.text = text

    Text.__module__ = "aim.sdk"
    library = stand_in("aim", **{"Text()": Text("hello")})
    tracker = AimTracker("run", "repository", log_system_params=False)
    tracker.start()
    tracker.store_init_configuration({"optimizer": {"lr": 0.1}})
    tracker.log({"loss": 0.5, "note": "hello", "many": [1, 2]}, step=3, context={"subset": "train"})
    tracker.finish()
    assert library.calls("Run") == [((), {"repo": "repository", "log_system_params": False})]
    assert library.calls("Run()[]") == [(("hparams", {"optimizer": {"lr": 0.1}}), {})]
    tracked = library.calls("Run().track")
    assert tracked[0] == ((0.5,), {"name": "loss", "step": 3, "context": {"subset": "train"}})
    assert [kwargs["name"] for _, kwargs in tracked] == ["loss", "note"]
    assert "leaves out 'many': it shows numbers, texts and Aim's objects, got list" in caplog.text
    assert len(library.calls("Run().close")) == 1


def test_an_image_may_have_a_caption(stand_in):
    library = stand_in("aim", **{"Image()": "an image"})
    tracker = AimTracker("run")
    tracker.start()
    options = {"aim_image": {"format": "png"}, "track": {"context": {"a": 1}}}
    tracker.log_images({"one": ("picture", "said"), "two": "other"}, step=2, kwargs=options)
    assert library.calls("Image") == [
        (("picture",), {"caption": "said", "format": "png"}),
        (("other",), {"caption": "", "format": "png"}),
    ]
    assert library.calls("Run().track")[0] == (
        ("an image",),
        {"name": "one", "step": 2, "context": {"a": 1}},
    )


def test_it_needs_a_folder(monkeypatch):
    monkeypatch.setattr(AimTracker, "is_installed", classmethod(lambda cls: True))
    with pytest.raises(ValueError, match="'aim' writes files: give logging_dir"):
        Accelerator(log_with="aim")
