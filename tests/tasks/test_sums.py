from orbit_jax.tasks.sums import Sums
from orbit_jax.tasks.task import Example, Turn, posed


def test_text_becomes_one_user_message_and_chat_stays():
    chat = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    assert posed(Example("a", "1 + 1", "2")) == [{"role": "user", "content": "1 + 1"}]
    assert posed(Example("a", chat, "2")) == list(chat)


def test_a_system_message_goes_before_text_but_into_no_chat():
    chat = ({"role": "user", "content": "u"},)
    task = Sums(system="Answer with a number.")
    assert task.messages(Example("a", "1 + 1", "2")) == [
        {"role": "system", "content": "Answer with a number."},
        {"role": "user", "content": "1 + 1"},
    ]
    assert task.messages(Example("a", chat, "2")) == list(chat)


def test_the_data_are_of_the_difficulties_that_are_named():
    task = Sums(0, 20, 5, 5, ("2x2", "max3x2"), "max4x2")
    known = [*task.examples("train"), *task.examples("heldout")]
    assert {e.difficulty for e in known} == {"2x2", "max3x2"}
    assert {e.difficulty for e in task.examples("unseen")} == {"max4x2"}
    assert {e.task for e in known} == {"sums"}
    assert task.examples("validation") == ()


def test_the_last_turn_is_graded():
    two = Example("a", "1 + 1", "2", "sums")
    texts = [r"1+1=2;\boxed{2}", r"\boxed{3}", r"\boxed{2"]
    scores = [Sums().grade(two, [Turn("assistant", "9"), Turn("assistant", t)]) for t in texts]
    assert [score.value for score in scores] == [1, 0, 0]
    assert [score.outcome for score in scores] == ["scored", "scored", "parse_failure"]
