// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// Ends that give themselves filters of system calls when they have a connection, and go on with it.
// `sandboxed server|client prctl|seccomp|all|strict|sleeps PORT`: in a filter of this thread or of all
// threads for read, write and a few more, in the strict mode, or without futex_waitv.
#include <arpa/inet.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CHECK(is) do { if (!(is)) { perror(#is); exit(3); } } while (0)
#define LEN(a) (sizeof(a) / sizeof(a)[0])
#define BLOCK 5000
#define TURNS 200

static void confine(const char *how) {
    static const unsigned allowed[] = {
        SYS_read, SYS_write, SYS_close, SYS_exit, SYS_exit_group, SYS_rt_sigreturn, SYS_futex,
    };
    struct sock_filter rules[2 * LEN(allowed) + 2] = { BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0) };
    int n = 1;
    for (unsigned i = 0; i < LEN(allowed); i++) {
        rules[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, allowed[i], 0, 1);
        rules[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    }
    rules[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    if (strcmp(how, "sleeps") == 0) {
        n = 1;
        rules[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_futex_waitv, 0, 1);
        rules[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
        rules[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    }
    struct sock_fprog filter = { n, rules };
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    if (strcmp(how, "strict") == 0) CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) == 0);
    if (strcmp(how, "prctl") == 0 || strcmp(how, "sleeps") == 0) {
        CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
    }
    unsigned for_all = strcmp(how, "all") ? 0 : SECCOMP_FILTER_FLAG_TSYNC;
    if (strcmp(how, "seccomp") == 0 || for_all) {
        CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, for_all, &filter) == 0);
    }
}

static void all(int fd, char *room, int is_out) {
    for (size_t done = 0; done < BLOCK;) {
        ssize_t n = is_out ? write(fd, room + done, BLOCK - done) : read(fd, room + done, BLOCK - done);
        if (n <= 0) syscall(SYS_exit, 4);
        done += n;
    }
}

int main(int argc, char **argv) {
    CHECK(argc == 4);
    int is_client = strcmp(argv[1], "client") == 0;
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(atoi(argv[3])) };
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (is_client) {
        CHECK(connect(fd, (void *)&at, sizeof at) == 0);
    } else {
        CHECK(bind(fd, (void *)&at, sizeof at) == 0 && listen(fd, 1) == 0);
        fd = accept(fd, NULL, NULL);
        CHECK(fd >= 0);
    }
    static char out[BLOCK], in[BLOCK];
    for (int turn = 0; turn < TURNS; turn++) {
        memset(out, turn, BLOCK);
        if (is_client) all(fd, out, 1);
        all(fd, in, 0);
        if (memcmp(in, out, BLOCK)) syscall(SYS_exit, 5);
        if (!is_client) all(fd, out, 1);
        // The peer's bytes may be there already.
        if (turn == TURNS / 2) confine(argv[2]);
    }
    char byte;
    if (is_client) {
        if (strcmp(argv[2], "strict")) close(fd);
    } else if (read(fd, &byte, 1) != 0) {
        syscall(SYS_exit, 6);
    }
    static const char text[] = "all bytes\n";
    if (write(1, text, sizeof text - 1) != sizeof text - 1) syscall(SYS_exit, 7);
    syscall(SYS_exit, 0);
}
