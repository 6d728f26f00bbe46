// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A client ends a connection with SO_LINGER whose server reads nothing: a signal ends the wait, or the
// end of the process does not begin it. `lingers MODE PORT WAY`. The server reads when the client comes
// a second time, and then finds all bytes.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(is) \
    do { if (!(is)) { dprintf(2, "%s: line %d: %s, errno %d\n", name, __LINE__, #is, errno); _exit(3); } } while (0)
// Seconds. No machine is so busy that a call takes a third of that.
#define LONG 60

static const char *name, *way;
static struct sockaddr_in at;
static volatile sig_atomic_t handled;
static sigjmp_buf out;

static int is(const char *other) {
    return strcmp(way, other) == 0;
}

static time_t now(void) {
    struct timespec time;
    CHECK(clock_gettime(CLOCK_MONOTONIC, &time) == 0);
    return time.tv_sec;
}

static void on_alarm(int number) {
    (void)number;
    handled = 1;
    if (is("jump")) {
        struct itimerval none = { 0 };
        CHECK(setitimer(ITIMER_REAL, &none, NULL) == 0);
        siglongjmp(out, 1);
    }
}

// A connection with more bytes than the server's buffers take, or with some that the server does not
// read.
static int connected(long *sent) {
    static char bytes[1 << 16];
    struct linger linger = { .l_onoff = 1, .l_linger = LONG };
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && connect(fd, (void *)&at, sizeof at) == 0);
    CHECK(setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
    ssize_t n;
    *sent = 0;
    CHECK(write(fd, bytes, 1) == 1 && read(fd, bytes, 1) == 1);
    while ((n = send(fd, bytes, is("exit") ? 1000 : sizeof bytes, MSG_DONTWAIT)) > 0) {
        *sent += n;
        if (is("exit")) break;
    }
    CHECK(n > 0 || errno == EAGAIN);
    return fd;
}

static void *close_it(void *fd) {
    close(*(int *)fd);
    return NULL;
}

static void end(int fd) {
    pthread_t thread;
    void *result;
    int other;
    if (is("cancel")) {
        CHECK(pthread_create(&thread, NULL, close_it, &fd) == 0);
        // The number is free when the wait has begun, or soon.
        while (fcntl(fd, F_GETFD) >= 0) usleep(1000);
        CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, &result) == 0);
        return;
    }
    struct sigaction action = { .sa_handler = on_alarm, .sa_flags = is("restart") ? SA_RESTART : 0 };
    struct itimerval soon = { { 0, 100000 }, { 0, 100000 } };
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    other = open("/dev/null", O_RDONLY);
    CHECK(other >= 0);
    if (sigsetjmp(out, 1) == 0) {
        CHECK(setitimer(ITIMER_REAL, &soon, NULL) == 0);
        if (is("dup2")) CHECK(dup2(other, fd) == fd);
        else if (is("dup3")) CHECK(dup3(other, fd, O_CLOEXEC) == fd);
        else if (is("close_range")) CHECK(close_range(fd, fd, 0) == 0);
        else CHECK(close(fd) == 0);
    }
    CHECK(handled);
    struct itimerval none = { 0 };
    CHECK(setitimer(ITIMER_REAL, &none, NULL) == 0);
}

static void visit(void) {
    int pipes[2], status;
    long sent;
    time_t begun;
    if (is("exit")) {
        CHECK(pipe(pipes) == 0);
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            connected(&sent);
            begun = now();
            CHECK(write(pipes[1], &sent, sizeof sent) == sizeof sent);
            CHECK(write(pipes[1], &begun, sizeof begun) == sizeof begun);
            exit(0);
        }
        CHECK(read(pipes[0], &sent, sizeof sent) == sizeof sent);
        CHECK(read(pipes[0], &begun, sizeof begun) == sizeof begun);
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    } else {
        int fd = connected(&sent);
        begun = now();
        end(fd);
    }
    CHECK(now() - begun < LONG / 3);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(fd >= 0 && connect(fd, (void *)&at, sizeof at) == 0);
    CHECK(write(fd, &sent, sizeof sent) == sizeof sent && close(fd) == 0);
}

static void serve(int listener) {
    static char room[1 << 16];
    long sent, got = 0;
    ssize_t n;
    int first = accept(listener, NULL, NULL);
    CHECK(first >= 0 && read(first, room, 1) == 1 && write(first, room, 1) == 1);
    int fd = accept(listener, NULL, NULL);
    CHECK(fd >= 0 && recv(fd, &sent, sizeof sent, MSG_WAITALL) == sizeof sent);
    while ((n = read(first, room, sizeof room)) > 0) got += n;
    CHECK(n == 0 && got == sent);
}

int main(int argc, char **argv) {
    name = argc > 1 ? argv[1] : "nobody";
    CHECK(argc == 4);
    way = argv[3];
    at = (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons(atoi(argv[2])) };
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (strcmp(name, "server") == 0) {
        int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
        CHECK(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
        CHECK(bind(listener, (void *)&at, sizeof at) == 0 && listen(listener, 16) == 0);
        serve(listener);
    } else {
        visit();
    }
    puts("all bytes");
    return 0;
}
