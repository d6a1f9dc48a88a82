import torch, stepgraph
from tests.support import mlp, adamw, regression_batch
def run(lowering, n=6):
    m=mlp(); e=stepgraph.Engine(m,optimizer=adamw(m),lowering=lowering,plan="zero3")
    losses=[e.step(regression_batch(seed=i)) for i in range(n)]
    return losses,e
def test_a(recorder):
    a,e=run("cuda_graph_eager")
    b,f=run("eager")
    assert [x.item() for x in a]==[x.item() for x in b]
    for (n,p),(m,q) in zip(e.model.named_parameters(), f.model.named_parameters()): assert torch.equal(p.full_tensor(),q.full_tensor())
    print(recorder.events, e.report())
    assert recorder.captures[0].replays==5
