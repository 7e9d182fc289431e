#!/bin/bash
# vllm.sh COMMAND...: runs a command of vLLM's environment (python, vllm) in the folder of the peers, which is the
# working folder, at the best settings found for its CPU build: tcmalloc and libiomp5, no binding, a thread a core.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)} VLLM_CPU_KVCACHE_SPACE=2 VLLM_CPU_OMP_THREADS_BIND=nobind
export VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 PATH=$PWD/vllm/bin:$PATH
preloaded=$(ls /usr/lib/*/libtcmalloc_minimal.so.4 2>/dev/null | head -1):$(find vllm/ -name libiomp5.so | head -1)
LD_PRELOAD=$(echo "${preloaded}" | sed "s|:vllm/|:$PWD/vllm/|; s|^:||; s|:\$||") exec "$@"
