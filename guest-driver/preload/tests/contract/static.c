/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/* A static program: "server PORT" echoes one connection; "client PORT" uses the connection in the
 * middle of signals, threads and children. Both end with "all bytes". "start PROGRAM WORD..." starts
 * another program. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <emmintrin.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static int fd;
static sigjmp_buf back;
static volatile sig_atomic_t times;
static char through[8];

#define CHECK(what) do { if (!(what)) fail(#what, __LINE__); } while (0)

static void fail(const char *what, int line)
{
    printf("line %d, errno %d: %s\n", line, errno, what);
    exit(1);
}

static int echoes(const char *text)
{
    char room[64];
    ssize_t n = strlen(text);
    return write(fd, text, n) == n && recv(fd, room, n, MSG_WAITALL) == n && !memcmp(room, text, n);
}

static void on_jump(int signal)
{
    (void)signal;
    siglongjmp(back, 1);
}

static void on_count(int signal)
{
    (void)signal;
    times++;
}

static void on_use(int signal)
{
    (void)signal;
    times++;
    CHECK(write(fd, "handler", 7) == 7 && recv(fd, through, 7, MSG_WAITALL) == 7);
}

static void handle(void (*handler)(int), int flags)
{
    struct sigaction action = {0};
    action.sa_handler = handler;
    action.sa_flags = flags;
    sigfillset(&action.sa_mask);
    CHECK(!sigaction(SIGALRM, &action, 0));
    times = 0;
}

/* A wait for bytes that do not come, and a signal soon. */
static int wait_for_signal(void)
{
    struct itimerval soon = {{0, 0}, {0, 1000}};
    char byte;
    CHECK(!setitimer(ITIMER_REAL, &soon, 0));
    return recv(fd, &byte, 1, 0) == -1 && errno == EINTR;
}

static void signals(void)
{
    static char room[20000];
    stack_t stack = {.ss_sp = room, .ss_size = sizeof room}, now;
    for (int alternate = 0; alternate < 2; alternate++) {
        if (alternate)
            CHECK(!sigaltstack(&stack, 0) && !sigaltstack(0, &now) && now.ss_sp == room);
        /* Many handlers that leave by a jump: the library's stack does not grow. */
        handle(on_jump, SA_NODEFER | (alternate ? SA_ONSTACK : 0));
        for (int i = 0; i < 500; i++)
            if (!sigsetjmp(back, 1))
                wait_for_signal();
        CHECK(echoes("after the jumps"));
        handle(on_use, alternate ? SA_ONSTACK : 0);
        memset(through, 0, sizeof through);
        CHECK(wait_for_signal() && times == 1 && !memcmp(through, "handler", 7));
    }
    handle(on_count, SA_RESETHAND);
    struct sigaction after;
    CHECK(wait_for_signal() && times == 1 && !sigaction(SIGALRM, 0, &after));
    CHECK(after.sa_handler == SIG_DFL);
    sigset_t all, old;
    sigfillset(&all);
    CHECK(!sigprocmask(SIG_BLOCK, &all, &old) && echoes("all signals blocked"));
    struct timespec short_time = {0, 1000000};
    struct pollfd wait = {fd, POLLIN, 0};
    CHECK(ppoll(&wait, 1, &short_time, &all) == 0);
    handle(on_count, 0);
    struct itimerval soon = {{0, 0}, {0, 1000}};
    sigdelset(&all, SIGALRM);
    CHECK(!setitimer(ITIMER_REAL, &soon, 0) && sigsuspend(&all) == -1 && times == 1);
    CHECK(!sigprocmask(SIG_SETMASK, &old, 0));
}

/* A call in the middle of a function: all registers but three stay. */
static void registers(void)
{
    __m128d vector = _mm_set_pd(1.5, 2.5);
    long number = SYS_sendto, flags, none = 0;
    register long r8 __asm__("r8") = 0, r9 __asm__("r9") = 0, r10 __asm__("r10") = 0;
    __asm__ volatile("movapd %1, %%xmm9\n pushfq\n orq $0x801, (%%rsp)\n popfq\n syscall\n"
                     "pushfq\n popq %2\n movapd %%xmm9, %1"
                     : "+a"(number), "+x"(vector), "=r"(flags)
                     : "D"((long)fd), "S"("v"), "d"(1L), "r"(r8), "r"(r9), "r"(r10), "r"(none)
                     : "rcx", "r11", "memory", "cc", "xmm9");
    double both[2];
    char byte;
    _mm_storeu_pd(both, vector);
    CHECK(number == 1 && both[0] == 2.5 && both[1] == 1.5 && (flags & 0x801) == 0x801);
    CHECK(recv(fd, &byte, 1, 0) == 1 && byte == 'v');
}

static void *ends(void *nothing)
{
    return nothing;
}

static pthread_barrier_t together;

static void *waits(void *nothing)
{
    pthread_barrier_wait(&together);
    return nothing;
}

/* The libc of this program and the library's have one heap of the kernel. */
static void heap(void)
{
    enum { BLOCKS = 2000, BYTES = 2000, THREADS = 600 };
    static unsigned char *blocks[BLOCKS];
    static pthread_t all[THREADS];
    for (int i = 0; i < BLOCKS; i++)
        CHECK((blocks[i] = malloc(BYTES)) && memset(blocks[i], i, BYTES));
    CHECK(!pthread_barrier_init(&together, 0, THREADS + 1));
    for (int i = 0; i < THREADS; i++)
        CHECK(!pthread_create(all + i, 0, waits, 0));
    pthread_barrier_wait(&together);
    for (int i = 0; i < THREADS; i++)
        CHECK(!pthread_join(all[i], 0));
    for (int i = 0; i < BLOCKS; i++) {
        for (int at = 0; at < BYTES; at++)
            CHECK(blocks[i][at] == (unsigned char)i);
        free(blocks[i]);
    }
}

static void *blocks(void *ready)
{
    char byte;
    pthread_barrier_wait(ready);
    recv(fd, &byte, 1, 0);
    return 0;
}

static void threads(void)
{
    pthread_t some[4];
    for (int i = 0; i < 100; i++) {
        for (int n = 0; n < 4; n++)
            CHECK(!pthread_create(some + n, 0, ends, 0));
        for (int n = 0; n < 4; n++)
            CHECK(!pthread_join(some[n], 0));
    }
    pthread_barrier_t ready;
    void *result;
    CHECK(!pthread_barrier_init(&ready, 0, 2) && !pthread_create(some, 0, blocks, &ready));
    pthread_barrier_wait(&ready);
    CHECK(!pthread_cancel(some[0]) && !pthread_join(some[0], &result));
    CHECK(result == PTHREAD_CANCELED && echoes("after a cancellation"));
}

static int status_of(pid_t child)
{
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void children(void)
{
    char byte;
    pid_t child = fork();
    if (!child)
        _exit(write(fd, "f", 1) == 1 ? 3 : 4);
    CHECK(status_of(child) == 3 && recv(fd, &byte, 1, 0) == 1 && byte == 'f');
    child = vfork();
    if (!child) {
        execl("/bin/true", "true", (char *)0);
        _exit(9);
    }
    CHECK(status_of(child) == 0);
    /* A static program by posix_spawn, with the connection. */
    char *words[] = {"static", "child", 0};
    posix_spawn_file_actions_t actions;
    CHECK(!posix_spawn_file_actions_init(&actions));
    CHECK(!posix_spawn_file_actions_adddup2(&actions, fd, 9));
    CHECK(!posix_spawn(&child, "/proc/self/exe", &actions, 0, words, environ));
    CHECK(write(fd, "p", 1) == 1 && status_of(child) == 7);
    CHECK(system("exit 6") == 6 << 8);
}

int main(int count, char **words)
{
    char room[4096], byte;
    if (count > 1 && !strcmp(words[1], "child"))
        return recv(9, &byte, 1, 0) == 1 && byte == 'p' ? 7 : 8;
    if (count > 2 && !strcmp(words[1], "start")) {
        pid_t child;
        CHECK(!posix_spawn(&child, words[2], 0, 0, words + 2, environ));
        return status_of(child);
    }
    struct sockaddr_in at = {AF_INET, htons(atoi(words[2])), {htonl(INADDR_LOOPBACK)}};
    fd = socket(AF_INET, SOCK_STREAM, 0);
    if (!strcmp(words[1], "server")) {
        int one = 1;
        ssize_t n;
        CHECK(!setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one));
        CHECK(!bind(fd, (void *)&at, sizeof at) && !listen(fd, 5));
        int accepted = accept(fd, 0, 0);
        CHECK(accepted >= 0);
        while ((n = read(accepted, room, sizeof room)) > 0)
            CHECK(write(accepted, room, n) == n);
        CHECK(n == 0);
    } else {
        CHECK(!connect(fd, (void *)&at, sizeof at) && echoes("the first bytes"));
        CHECK(read(-1, room, 1) == -1 && errno == EBADF);
        registers();
        signals();
        threads();
        heap();
        children();
        CHECK(echoes("the last bytes") && !shutdown(fd, SHUT_WR) && read(fd, room, 1) == 0);
    }
    puts("all bytes");
    return 0;
}
