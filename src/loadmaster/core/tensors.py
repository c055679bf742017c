from loadmaster.core.facts import ModelFacts, TensorGroup
def synthesise(model: ModelFacts) -> tuple[TensorGroup, ...]:
    return ()
