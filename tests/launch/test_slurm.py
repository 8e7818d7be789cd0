import os, sys, time
from pathlib import Path
import pytest, subprocess
pytestmark = pytest.mark.slurm
ROOT=Path(__file__).resolve().parents[2]
@pytest.fixture
def submit(cluster, tmp_path):
    def go(*flags, nodes=2, **kw):
        out=cluster.command(sys.executable, ROOT/"launch/submit.py","--nodes",nodes,"--gpus-per-node",0,"--time","10:00","--",*flags,"--logs",tmp_path/"logs","--name","a run",cwd=tmp_path)
        return out.split("job ")[1].split(";")[0]
    return go
def show(tmp_path, job):
    print((tmp_path/f"logs/slurm/openlm-moe-{job}.out").read_text())
def test_ends(cluster, submit, tmp_path):
    job=submit("--steps", 3); print(cluster.wait_for(job,"COMPLETED","FAILED")); show(tmp_path,job)
def test_requeue(cluster, submit, tmp_path):
    job=submit("--steps", 60); cluster.wait_for(job,"RUNNING"); time.sleep(12)
    cluster.command("scancel","--batch","--signal=USR1",job); t=time.time()
    print(cluster.wait_for(job,"PENDING")); print(time.time()-t)
    print(cluster.wait_for(job,"COMPLETED","FAILED")); print(time.time()-t); show(tmp_path,job)
def test_crash(cluster, submit, tmp_path):
    job=submit("--steps", 60, "--crash", 5);print(cluster.wait_for(job,"COMPLETED","FAILED")); show(tmp_path,job)
def test_cancel(cluster, submit, tmp_path):
    job=submit("--steps", 60); cluster.wait_for(job,"RUNNING"); time.sleep(12)
    cluster.command("scancel",job); cluster.wait_for(job,"CANCELLED"); time.sleep(8); show(tmp_path,job); print(cluster.command("squeue"))
def test_dead(cluster, submit, tmp_path):
    
    job=submit("--steps", 60); cluster.wait_for(job,"RUNNING"); time.sleep(12)
    t=time.time(); cluster.kill_node("n2")
    print(cluster.wait_for(job,"PENDING"), time.time()-t); show(tmp_path,job)
    cluster.start_node("n2"); print(cluster.wait_for(job,"COMPLETED","FAILED",timeout=240)); print(time.time()-t);show(tmp_path,job)
