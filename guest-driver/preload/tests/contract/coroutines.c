// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// Both ends of connections in coroutines of the first thread, from the first call of a socket on.
// `coroutines MODE PORT KIB`: each has a stack of so many KiB, and a page below that nobody may touch.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#define CHECK(is) \
    do { if (!(is)) { dprintf(2, "%s: line %d: %s, errno %d\n", name, __LINE__, #is, errno); _exit(3); } } while (0)
#define SIZE 3000
#define ROUNDS 6

static const char *name;
static struct sockaddr_in at;
static char out[SIZE], in[SIZE];
static int listener = -1, set = -1, round_of;
static ucontext_t caller;

// Waits by another way each time.
static void await(int fd, int events, int turn) {
    struct pollfd one = { .fd = fd, .events = events };
    struct epoll_event event = { .events = events };
    int found;
    do {
        if (turn % 3 == 2 && !(fcntl(fd, F_GETFL) & O_NONBLOCK)) return;
        if (turn % 3 != 1) {
            found = poll(&one, 1, -1);
        } else {
            CHECK(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0);
            found = epoll_wait(set, &event, 1, -1);
            CHECK(epoll_ctl(set, EPOLL_CTL_DEL, fd, &event) == 0);
        }
        // A relay that comes or goes may end a wait.
    } while (found < 0 && errno == EINTR);
    CHECK(found == 1);
}

static void get(int fd, int turn) {
    for (int got = 0; got < SIZE;) {
        await(fd, POLLIN, turn);
        ssize_t n = turn % 2 ? read(fd, in + got, SIZE - got) : recv(fd, in + got, SIZE - got, 0);
        CHECK(n > 0 || (n < 0 && errno == EAGAIN));
        if (n > 0) got += n;
    }
}

static void put(int fd, const char *from, int turn) {
    for (int sent = 0; sent < SIZE;) {
        await(fd, POLLOUT, turn);
        ssize_t n = turn % 2 ? write(fd, from + sent, SIZE - sent) : send(fd, from + sent, SIZE - sent, 0);
        CHECK(n > 0 || (n < 0 && errno == EAGAIN));
        if (n > 0) sent += n;
    }
}

static void echo(int fd, int turn) {
    get(fd, turn);
    put(fd, in, turn);
}

static void ask(int fd, int turn) {
    memset(out, turn + 1, SIZE);
    put(fd, out, turn);
    get(fd, turn);
    CHECK(memcmp(in, out, SIZE) == 0);
}

static int connected(int later) {
    int fd = socket(AF_INET, SOCK_STREAM | (later ? SOCK_NONBLOCK : 0), 0), error = 0;
    socklen_t length = sizeof error;
    CHECK(fd >= 0);
    int done = connect(fd, (void *)&at, sizeof at);
    CHECK(done == 0 || (later && errno == EINPROGRESS));
    await(fd, POLLOUT, round_of);
    CHECK(getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0);
    return fd;
}

// Turn 2: on the stack of a handler.
static void on_alarm(int number) {
    (void)number;
    int fd = connected(0);
    ask(fd, 2);
    CHECK(close(fd) == 0);
}

static void end(int fd) {
    struct linger linger = { .l_onoff = 1, .l_linger = 20 };
    if (round_of % 2) CHECK(setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
    CHECK(shutdown(fd, SHUT_WR) == 0 && close(fd) == 0);
}

static void in_child(int fd, void (*turn)(int, int)) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        turn(fd, 3);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static int accepted(void) {
    int fd;
    if (round_of % 2) {
        CHECK(fcntl(listener, F_SETFL, O_NONBLOCK) == 0);
        await(listener, POLLIN, round_of);
    } else {
        CHECK(fcntl(listener, F_SETFL, 0) == 0);
    }
    fd = accept4(listener, NULL, NULL, round_of % 2 ? SOCK_NONBLOCK : 0);
    CHECK(fd >= 0);
    return fd;
}

static void serve(void) {
    int fd = accepted();
    for (int turn = 0; turn < 3; turn++) echo(fd, turn);
    if (round_of == 2) in_child(fd, echo);
    if (round_of == 3) CHECK(system("true") == 0);
    // The client's child has a turn, or the client has one more for the child of this end.
    for (int turn = round_of == 3 ? 3 : 4; turn < 7; turn++) echo(fd, turn);
    CHECK(read(fd, in, SIZE) == 0 || errno == EAGAIN);
    end(fd);
    if (round_of == 4) {
        fd = accepted();
        echo(fd, 2);
        CHECK(close(fd) == 0);
    }
}

static void visit(void) {
    int fd = connected(round_of % 2);
    for (int turn = 0; turn < 3; turn++) ask(fd, turn);
    if (round_of == 3) in_child(fd, ask);
    if (round_of == 2) CHECK(system("true") == 0);
    for (int turn = round_of == 2 ? 3 : 4; turn < 7; turn++) ask(fd, turn);
    end(fd);
    if (round_of == 4) {
        struct sigaction action = { .sa_handler = on_alarm, .sa_flags = SA_ONSTACK };
        CHECK(sigaction(SIGALRM, &action, NULL) == 0 && raise(SIGALRM) == 0);
    }
}

static char *stack(size_t size) {
    char *room = mmap(NULL, size + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(room != MAP_FAILED && mprotect(room, 4096, PROT_NONE) == 0);
    return room + 4096;
}

static void work(void) {
    if (strcmp(name, "server") == 0) {
        int on = 1;
        listener = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
        CHECK(bind(listener, (void *)&at, sizeof at) == 0 && listen(listener, 16) == 0);
    }
    set = epoll_create1(0);
    for (round_of = 0; round_of < ROUNDS; round_of++) {
        if (listener >= 0) serve();
        else visit();
    }
}

int main(int argc, char **argv) {
    name = argc > 1 ? argv[1] : "nobody";
    CHECK(argc == 4);
    at = (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons(atoi(argv[2])) };
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    size_t size = atol(argv[3]) << 10;
    stack_t other = { .ss_sp = stack(size + sysconf(_SC_MINSIGSTKSZ)), .ss_size = size + sysconf(_SC_MINSIGSTKSZ) };
    CHECK(sigaltstack(&other, NULL) == 0);
    ucontext_t coroutine;
    CHECK(getcontext(&coroutine) == 0);
    coroutine.uc_stack.ss_sp = stack(size);
    coroutine.uc_stack.ss_size = size;
    coroutine.uc_link = &caller;
    makecontext(&coroutine, work, 0);
    CHECK(swapcontext(&caller, &coroutine) == 0);
    puts("all bytes");
    return 0;
}
