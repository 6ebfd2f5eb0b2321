r"""PPO on the shipped tiny mixture of experts: a learning curve on a laptop.

Command:
  python experiments/ppo_math.py --config configs/tiny_moe.py
Variants (`configs/tiny_moe.py:gae`):
  gae     a critic (second adapter, scalar head), generalised advantages, two updates a batch
  mesh8   the same run on eight simulated devices
  test    a few small steps, as the tests run it
Cost, on two CPU cores: under three minutes (gae four, mesh8 five), 2 GB of memory.
Expected, of 500 held-out problems: greedy 29% -> 100%, at temperature 1 about 31% -> 99%; the
never-trained difficulty stays at 3% to 5%; log-prob gap exactly 0 at every step.
"""

from ml_collections import ConfigDict


def get_config(variant: str = "") -> ConfigDict:
    """The recipe; `variant` is what stands behind the colon on the command line."""
    config = ConfigDict()
    config.experiment = "ppo_math"  # first part of the run folder's name
    config.seed = 0  # of adapter, noise and problem order
    config.steps = 60  # PPO steps
    config.parity = "auto"  # log-prob recipe: auto, fast, tiles or corrected

    config.base = ConfigDict()
    config.base.path = "orbit_jax/assets/tiny_moe_int4"  # a Hugging Face folder or .gguf file
    config.base.own = ()  # one's own model families and ways of quantising: my_file.py:my_family
    config.base.weights = (
        "checkpoint"  # or random: a rehearsal, without a download, of path's model
    )
    config.base.working_copy = "auto"  # widen to bf16 once (same bits): auto, never or always
    config.base.working_copy_share = 0.1  # auto: only if it fits this share of the free memory

    config.adapter = ConfigDict()
    config.adapter.initial = ""  # a PEFT folder to begin from; empty: a fresh adapter
    # lora, or oft: a rotation of each weight's input. The learning rate of 5e-4 is good for both
    # here; oft also learns at 2e-3, at 8e-3 it collapses. One's own is my_file.py:my_method.
    config.adapter.method = "lora"
    config.adapter.rank = 16  # R of LoRA; this and the next three mean nothing to oft
    config.adapter.alpha = 32.0  # the update is scaled by alpha / rank
    config.adapter.rank_stabilized = False  # alpha / sqrt(rank) instead (rsLoRA)
    config.adapter.initialization = "kaiming"  # of A, or gaussian, orthogonal; B is 0
    config.adapter.block_size = 32  # of oft, and the next two; divides each weight's input width
    config.adapter.neumann_terms = 5  # of the rotation's series; 0: the exact rotation
    config.adapter.block_share = False  # one block for all of a weight's input
    config.adapter.targets = (  # module names; this, all linear layers, means those of the base
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    # Own ranks, and alphas: experts.gate_proj:2, experts.up_proj:2:4; of oft own block sizes.
    config.adapter.overrides = ()
    # Each expert has factors of its own; or a layer's share the outer ones, or all. Of oft, outer
    # is one rotation for gate and one for up, and down has one for each expert.
    config.adapter.experts = "each"
    config.adapter.critic_targets = ()  # of the critic; empty: those of the policy

    config.task = ConfigDict()
    # Tasks, with weights before them or without, as ("sums", "2*data:problems.jsonl"); their names
    # are told in orbit_jax/tasks/registry.py.
    config.task.mixture = ("sums",)
    config.task.data_seed = 0  # of the generated problems
    config.task.train_problems = 10_000  # of sums and products; other tasks give all they have
    config.task.heldout_problems = 500  # never trained on; of each task at most so many
    config.task.unseen_problems = 500  # of a difficulty that is never trained on
    config.task.difficulties = ("3x1", "4x1", "5x1")  # of generated ones; see tasks/problems.py
    config.task.unseen_difficulty = "6x1"  # none of those
    config.task.system = ""  # a system message before problems that are plain text; empty: none
    config.task.grader_workers = 1  # processes for symbolic answers; started only when needed
    config.task.grader_max_seconds = 5.0  # per symbolic answer, wall clock
    config.task.max_grading_seconds = 300.0  # per rollout, of any task; then it is an infra failure
    config.task.partial_credit = False  # programs: the share of tests passed, else all or nothing

    config.reward = ConfigDict()
    config.reward.correctness = 1.0  # weight of the task's grade, from 0 to 1
    # A regular expression that the whole text should meet; empty: none. Mind those that try without
    # end, as (a+)+b does: nothing stops them.
    config.reward.format = ""
    config.reward.format_weight = 0.1  # what meeting it adds
    config.reward.length_buffer = 0  # last tokens before max_completion_tokens that cost; 0: none
    config.reward.length_weight = 0.5  # what reaching that limit costs, less within the buffer

    config.tools = ConfigDict()  # of tasks of several turns, and of programs
    # For tasks that bring none of their own: calculator, python, search:corpus.jsonl.
    config.tools.use = ()
    config.tools.syntax = ""  # of calls; empty: as the model's chat template shows it, else plain
    config.tools.max_turns = 4  # of the assistant's in a rollout
    config.tools.max_seconds = 10.0  # of a call, wall clock
    config.tools.workers = 16  # calls at the same time
    # Of a program in the sandbox, wall clock and CPU; below max_seconds it can tell what was wrong.
    config.tools.program_seconds = 8.0
    config.tools.isolation = "strict"  # of untrusted code; weak: limits alone, on your own risk
    config.tools.sandbox_workers = 2  # programs at the same time

    config.sampler = ConfigDict()
    config.sampler.prompts_per_step = 32
    config.sampler.group_size = 8  # rollouts of each prompt
    config.sampler.temperature = 1.0  # of training rollouts
    config.sampler.max_prompt_tokens = 20  # longer prompts are refused at the start
    config.sampler.max_completion_tokens = 44
    config.sampler.slots = 0  # rollouts that decode together, the others wait; 0: all of a step

    config.ppo = ConfigDict()
    config.ppo.loss = "ppo_clip"  # or gspo, cispo, policy_gradient, my_file.py:my_loss
    # How tokens' losses make one number: token_mean, sequence_mean (of the means over rows) or
    # constant_length (Dr. GRPO's: by rows x max_completion_tokens).
    config.ppo.aggregation = "token_mean"
    # Of a prompt's rollouts: grpo, dr_grpo (not divided by their spread), rloo,
    # reinforce_pp_baseline; of a step's: reinforce, reinforce_pp; gae trains a critic. One's own is
    # my_file.py:my_advantage.
    config.ppo.advantage = "grpo"
    # Most rounds of sampling a step, to replace groups of equal rewards (DAPO); 0: one, as it is.
    config.ppo.dynamic_sampling = 0
    config.ppo.overlong_filter = False  # do not train on rows cut at the limit; their reward counts
    config.ppo.epochs = 1  # passes over a step's rollouts
    config.ppo.minibatches = 1  # optimiser updates per pass
    config.ppo.max_kl = 0.0  # no more updates once KL to the rollout policy is above it; 0: any
    config.ppo.micro_batches = 2  # parts that are in memory one after another
    config.ppo.token_buckets = (0.7, 1.0)  # lengths compiled, as shares of a full batch
    config.ppo.remat = "auto"  # make layers again in the backward pass: auto (if memory needs it)
    config.ppo.clip_low = 0.2  # the ratio may fall to 1 - clip_low
    config.ppo.clip_high = 0.28  # and rise to 1 + clip_high; of gspo both are near 4e-4
    config.ppo.dual_clip = 0.0  # bound for negative advantages, above 1; 0 for none
    config.ppo.std_floor = 1e-4  # smallest spread that advantages are divided by
    config.ppo.gamma = 1.0  # discount per token (gae, reinforce_pp)
    config.ppo.lam = 1.0  # lambda of gae
    config.ppo.whiten = True  # standardise gae's advantages over the batch
    config.ppo.bootstrap_truncated = False  # rows cut at the length limit go on in value (gae)
    config.ppo.value_coefficient = 0.5  # weight of the critic's loss
    config.ppo.value_clip = 0.0  # how far a value may move from the old one; 0 for any
    config.ppo.entropy_coefficient = 0.0  # bonus on entropy
    config.ppo.kl = "off"  # to the base: off, metric, reward or loss
    config.ppo.kl_estimator = "k1"  # or k2, k3; in the loss the gradient is the same, KL's own
    config.ppo.kl_coefficient = 0.0  # weight of it
    config.ppo.kl_target = 0.0  # KL per token that the coefficient is adapted to; 0: it is fixed
    config.ppo.kl_horizon = 10.0  # steps: how slowly it is adapted
    # Of the corrected recipe: weights of tokens or of whole rows, cut at max_importance_weight
    # (token_tis, sequence_tis) or dropped beyond it (token_mask, sequence_mask).
    config.ppo.correction = "token_tis"
    config.ppo.max_importance_weight = 2.0

    config.optimizer = ConfigDict()
    config.optimizer.learning_rate = 5e-4  # AdamW, after warm-up
    config.optimizer.critic_learning_rate = 2e-3
    config.optimizer.warmup_steps = 5
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.99
    config.optimizer.weight_decay = 0.0
    config.optimizer.max_gradient_norm = 1.0  # of policy and critic apart

    config.mesh = ConfigDict()
    config.mesh.data = 1  # devices over rows
    config.mesh.tensor = 1  # devices over dense outputs; experts lie over both
    config.mesh.simulate = False  # simulate data x tensor devices on the CPU
    config.mesh.processes = 1  # that share the devices, as one on each node
    config.mesh.process = -1  # this one's number, from 0; -1: as Slurm or Open MPI says
    config.mesh.coordinator = ""  # host:port of process 0; empty: as Slurm or Open MPI says

    config.evaluation = ConfigDict()
    config.evaluation.every_steps = 10
    config.evaluation.problems = 128  # held-out ones during the run; before and after, all

    config.run = ConfigDict()
    config.run.root = "runs"  # where run folders go
    config.run.compilation_cache = True  # keep compiled programs in it, for the next start
    config.run.checkpoint_every_steps = 50
    config.run.keep_checkpoints = 2
    config.run.samples_every_steps = 10
    # Also log to this project of Weights & Biases (pip install wandb); empty: no. What goes wrong
    # there never ends a run; for machines without a network set WANDB_MODE=offline.
    config.run.wandb = ""

    config.alerts = ConfigDict()  # told in the terminal, log.txt, alerts.jsonl and TensorBoard
    config.alerts.off = ()  # names of orbit_jax/runs/alert_rules.py and hardware_rules.py
    # Called with each alert as JSON on its standard input, without a shell; empty: nothing.
    config.alerts.command = ""
    config.alerts.command_seconds = 10.0  # after which a call is ended; the run does not wait
    config.alerts.hardware_seconds = 60.0  # between readings of memory, disk and GPUs
    # entropy_collapse: the last 10 steps have less than this share of the entropy of the first 10,
    # and a grade that neither rises nor is above 0.9.
    config.alerts.entropy_share = 0.05
    config.alerts.length_growth = 3.0  # length_runaway: times that of the first steps, and no gain
    config.alerts.truncated_share = 0.5  # truncation: of completions cut at the limit of tokens
    config.alerts.router_growth = (
        2.0  # router_collapse: of load_max_over_mean since the first steps
    )
    config.alerts.stuck_steps = 200  # reward_stuck: without a rise beyond chance
    config.alerts.kl_rollout = 0.1  # kl_runaway: per token, from the policy that sampled
    config.alerts.kl_reference = 1.0  # kl_runaway: per token, from the reference
    config.alerts.infra_share = 0.05  # infra_failures: of rollouts that could not be graded
    config.alerts.memory_share = 0.95  # memory: in use, of a device's at the peak, of the host's
    config.alerts.disk_free_gb = 2.0  # disk: free where the run folder is
    config.alerts.gpu_celsius = 87.0  # gpu_temperature

    if variant == "gae":
        config.ppo.advantage = "gae"
        config.ppo.minibatches = 2
    elif variant == "mesh8":
        config.mesh.data, config.mesh.tensor, config.mesh.simulate = 4, 2, True
    elif variant == "test":
        config.steps = 2
        config.sampler.prompts_per_step = 8
        config.sampler.group_size = 2
        config.ppo.token_buckets = (1.0,)
        config.task.train_problems, config.task.heldout_problems = 64, 8
        config.task.unseen_problems = 8
        config.evaluation.every_steps = 1
        config.evaluation.problems = 8
    elif variant:
        raise ValueError(f"tiny_moe has no variant {variant!r}: use gae, mesh8 or test")
    return config
