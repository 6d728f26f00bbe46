// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// Becomes another program in a filter of system calls. `filtered ends|refuses CALL,CALL.. PROGRAM ARG..`:
// the process is ended for each of these calls, or the call fails with EPERM. CALL:ARGUMENT:BITS: only
// if an argument has all of these bits. `filtered mdwe 0 PROGRAM ARG..`: PR_SET_MDWE instead.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#ifndef PR_SET_MDWE
#define PR_SET_MDWE 65
#endif
#define CHECK(is) do { if (!(is)) { perror(#is); exit(3); } } while (0)
#define MOST 200

int main(int argc, char **argv) {
    CHECK(argc >= 4);
    unsigned action = strcmp(argv[1], "ends") ? SECCOMP_RET_ERRNO | 1 : SECCOMP_RET_KILL_PROCESS;
    if (!strcmp(argv[1], "mdwe")) {
        if (prctl(PR_SET_MDWE, 1, 0, 0, 0))
            return 77;
        execvp(argv[3], argv + 3);
    }
    struct sock_filter rules[6 * MOST + 2] = { BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0) };
    int n = 1;
    for (char *call = strtok(argv[2], ","); call; call = strtok(NULL, ",")) {
        unsigned argument = 0, bits = 0;
        CHECK(n < 6 * MOST);
        int given = sscanf(call, "%*u:%u:%u", &argument, &bits) == 2;
        rules[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, atoi(call), 0, given ? 5 : 1);
        if (given) {
            rules[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 16 + 8 * argument);
            rules[n++] = (struct sock_filter)BPF_STMT(BPF_ALU | BPF_AND | BPF_K, bits);
            rules[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, bits, 0, 1);
        }
        rules[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, action);
        if (given)
            rules[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0);
    }
    rules[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog filter = { n, rules };
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
    execvp(argv[3], argv + 3);
    CHECK(!"the program begins");
}
