// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A client that does to its connections what POSIX allows, and a server that echoes. Each prints what
// happened. `program MODE PORT`.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(is) do { if (!(is)) { printf("line %d: %s, errno %d\n", __LINE__, #is, errno); \
    fflush(stdout); abort(); } } while (0)

static int port;
static int fd;
static volatile int handled;

static struct sockaddr_in address(void) {
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(port) };
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return a;
}

static int connected(void) {
    struct sockaddr_in a = address();
    int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(s >= 0);
    int r;
    while ((r = connect(s, (void *)&a, sizeof a)) < 0 && errno == EINTR) {}
    CHECK(r == 0 || errno == EISCONN);
    return s;
}

static void exchange(int s) {
    char in[5] = "hello", out[5];
    for (size_t n = 0; n < 5;) {
        ssize_t r = send(s, in + n, 5 - n, 0);
        if (r < 0 && errno == EINTR) continue;
        CHECK(r > 0);
        n += r;
    }
    for (size_t n = 0; n < 5;) {
        ssize_t r = recv(s, out + n, 5 - n, 0);
        if (r < 0 && errno == EINTR) continue;
        CHECK(r > 0);
        n += r;
    }
}

static void on(int signal, void (*handler)(int), int flags) {
    struct sigaction action = { .sa_handler = handler, .sa_flags = flags };
    CHECK(sigaction(signal, &action, NULL) == 0);
}

static volatile long period;

// The next signal of the timer, which may come at any place of the program. A handler asks for the
// next one at its end, so the program goes on however long the handler takes.
static void again(void) {
    struct itimerval t = { { 0, 0 }, { 0, period } };
    CHECK(setitimer(ITIMER_REAL, &t, NULL) == 0);
}

static void timer(long micros) {
    period = micros;
    again();
}

// --- the server ---

static void *echo(void *argument) {
    int s = (intptr_t)argument;
    static __thread char buf[65536];
    for (;;) {
        ssize_t n = recv(s, buf, sizeof buf, 0);
        if (n <= 0) {
            printf(n == 0 ? "end\n" : "error %d\n", errno);
            fflush(stdout);
            close(s);
            return NULL;
        }
        for (ssize_t at = 0; at < n;) {
            ssize_t r = send(s, buf + at, n - at, MSG_NOSIGNAL);
            if (r < 0) break;
            at += r;
        }
    }
}

static void server(int connections) {
    struct sockaddr_in a = address();
    int l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
    setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    CHECK(bind(l, (void *)&a, sizeof a) == 0 && listen(l, 64) == 0);
    pthread_t *threads = calloc(connections, sizeof *threads);
    for (int i = 0; i < connections; i++) {
        int s = accept(l, NULL, NULL);
        CHECK(s >= 0);
        CHECK(pthread_create(&threads[i], NULL, echo, (void *)(intptr_t)s) == 0);
    }
    for (int i = 0; i < connections; i++) pthread_join(threads[i], NULL);
}

// --- handlers that call ---

static volatile long sent;

static void send_one(int signal) {
    (void)signal;
    int error = errno;
    if (send(fd, "x", 1, MSG_DONTWAIT) == 1) sent++;
    handled++;
    again();
    errno = error;
}

static void poll_it(int signal) {
    (void)signal;
    int error = errno;
    struct pollfd p = { .fd = fd, .events = POLLIN | POLLOUT };
    CHECK(poll(&p, 1, 0) >= 0);
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    struct timeval now = { 0, 0 };
    CHECK(select(fd + 1, &set, NULL, NULL, &now) >= 0);
    handled++;
    again();
    errno = error;
}

static void peek_it(int signal) {
    (void)signal;
    int error = errno;
    char byte;
    recv(fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK);
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &(int){ 0 }, &(socklen_t){ sizeof(int) });
    int copy = dup(fd);
    CHECK(copy >= 0 && close(copy) == 0);
    handled++;
    again();
    errno = error;
}

static void fork_it(int signal) {
    (void)signal;
    int error = errno;
    pid_t child = fork();
    if (child == 0) _exit(0);
    if (child > 0) while (waitpid(child, NULL, 0) < 0 && errno == EINTR) {}
    handled += 10;
    again();
    errno = error;
}

// Sends and receives all the time, until the handler has run often.
static void busy(void (*handler)(int)) {
    fd = connected();
    exchange(fd);
    on(SIGALRM, handler, SA_RESTART);
    timer(500);
    static char out[3000], in[6000];
    long received = 0;
    sent = 0;
    long own = 0;
    while (handled < 600) {
        size_t n = 1 + own % sizeof out;
        for (size_t at = 0; at < n;) {
            ssize_t r = send(fd, out + at, n - at, 0);
            if (r < 0 && errno == EINTR) continue;
            CHECK(r > 0);
            at += r;
        }
        own += n;
        struct pollfd p = { .fd = fd, .events = POLLIN };
        int r = poll(&p, 1, 1000);
        CHECK(r >= 0 || errno == EINTR);
        while (received < own) {
            ssize_t r = recv(fd, in, sizeof in, 0);
            if (r < 0 && errno == EINTR) continue;
            CHECK(r > 0);
            received += r;
        }
    }
    timer(0);
    CHECK(shutdown(fd, SHUT_WR) == 0);
    for (ssize_t r; (r = recv(fd, in, sizeof in, 0)) != 0;) {
        if (r < 0 && errno == EINTR) continue;
        CHECK(r > 0);
        received += r;
    }
    CHECK(received == own + sent);
    printf("all bytes\n");
}

static void connect_another(int signal) {
    (void)signal;
    int error = errno;
    if (handled < 40) {
        int s = connected();
        exchange(s);
        CHECK(close(s) == 0);
        handled++;
    }
    again();
    errno = error;
}

// A handler that makes connections, beside the same in the program.
static void connections(void) {
    on(SIGALRM, connect_another, SA_RESTART);
    timer(3000);
    for (int i = 0; i < 40 || handled < 40; i++) {
        if (i >= 40) {
            pause();
            continue;
        }
        int s = connected();
        exchange(s);
        CHECK(close(s) == 0);
    }
    timer(0);
    printf("80 connections\n");
}

// --- jumps ---

static sigjmp_buf back;
static volatile int jumps;

static void jump(int signal) {
    (void)signal;
    jumps++;
    siglongjmp(back, 1);
}

static void wait_by(int how) {
    char byte;
    struct pollfd p = { .fd = fd, .events = POLLIN };
    struct epoll_event event = { .events = EPOLLIN };
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    static int epoll = -1;
    static char much[1 << 20];
    switch (how) {
    case 0: recv(fd, &byte, 1, 0); break;
    case 1: poll(&p, 1, -1); break;
    case 2: select(fd + 1, &set, NULL, NULL, NULL); break;
    case 3:
        if (epoll < 0) {
            epoll = epoll_create1(EPOLL_CLOEXEC);
            CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0);
        }
        epoll_wait(epoll, &event, 1, -1);
        break;
    case 4: recv(fd, &byte, 1, MSG_PEEK | MSG_WAITALL); break;
    case 5: {
        struct iovec iov = { &byte, 1 };
        struct msghdr header = { .msg_iov = &iov, .msg_iovlen = 1 };
        recvmsg(fd, &header, 0);
        break;
    }
    case 6: read(fd, &byte, 1); break;
    default: send(fd, much, 0, 0); pause();
    }
    if (how < 7) CHECK(!"nothing to wait for came");
}

static void jumping(void) {
    fd = connected();
    exchange(fd);
    on(SIGALRM, jump, 0);
    for (int how = 0; how < 8; how++) {
        for (volatile int i = 0; i < 20; i++) {
            if (sigsetjmp(back, 1) == 0) {
                struct itimerval t = { { 0, 0 }, { 0, 100 + 700 * i } };
                CHECK(setitimer(ITIMER_REAL, &t, NULL) == 0);
                wait_by(how);
            }
        }
        exchange(fd);
    }
    CHECK(jumps == 160);
    // Jumps out of anything.
    for (volatile int i = 0; i < 300; i++) {
        if (sigsetjmp(back, 1) == 0) {
            struct itimerval t = { { 0, 0 }, { 0, 50 + 13 * (i % 40) } };
            CHECK(setitimer(ITIMER_REAL, &t, NULL) == 0);
            int s = connected();
            for (;;) {
                exchange(s);
                int copy = dup(s);
                close(copy);
            }
        }
    }
    printf("jumped\n");
}

// --- cancellation ---

static volatile int cleaned;
static int how_waits, is_async;

static void clean(void *argument) {
    (void)argument;
    cleaned++;
}

static void *waits(void *argument) {

    pthread_setcanceltype(is_async ? PTHREAD_CANCEL_ASYNCHRONOUS : PTHREAD_CANCEL_DEFERRED, NULL);
    pthread_cleanup_push(clean, NULL);
    *(volatile int *)argument = 1;
    wait_by(how_waits);
    pthread_cleanup_pop(0);
    return NULL;
}

static volatile long streamed;

// As iperf3's threads: receives what comes without end.
static void *streams(void *argument) {
    int s = (intptr_t)argument;
    static char buf[4096];
    pthread_setcanceltype(is_async ? PTHREAD_CANCEL_ASYNCHRONOUS : PTHREAD_CANCEL_DEFERRED, NULL);
    pthread_cleanup_push(clean, NULL);
    for (;;) {
        CHECK(send(s, buf, sizeof buf, 0) > 0);
        ssize_t n = recv(s, buf, sizeof buf, 0);
        CHECK(n > 0);
        streamed += n;
    }
    pthread_cleanup_pop(0);
    return NULL;
}

static void cancel(pthread_t thread) {
    void *result;
    CHECK(pthread_cancel(thread) == 0);
    CHECK(pthread_join(thread, &result) == 0);
    CHECK(result == PTHREAD_CANCELED);
}

static void *disabled(void *argument) {
    char word[5];
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    *(volatile int *)argument = 1;
    CHECK(recv(fd, word, 5, MSG_WAITALL) == 5);
    *(volatile int *)argument = 2;
    pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
    wait_by(0);
    return NULL;
}

static void cancelling(void) {
    fd = connected();
    exchange(fd);
    int made = 0;
    for (is_async = 0; is_async < 2; is_async++) {
        for (how_waits = 0; how_waits < 7; how_waits++) {
            for (int i = 0; i < 6; i++) {
                pthread_t thread;
                volatile int begun = 0;
                CHECK(pthread_create(&thread, NULL, waits, (void *)&begun) == 0);
                made++;
                while (!begun) usleep(100);
                usleep(i * i * 300);
                cancel(thread);
                CHECK(cleaned == made);
            }
            exchange(fd);
        }
        for (int i = 0; i < 10; i++) {
            pthread_t thread;
            int s = connected();
            streamed = 0;
            CHECK(pthread_create(&thread, NULL, streams, (void *)(intptr_t)s) == 0);
            made++;
            while (streamed == 0) usleep(100);
            usleep(i * 300);
            cancel(thread);
            CHECK(cleaned == made);
            // Unread bytes would make a reset of the end.
            CHECK(shutdown(s, SHUT_WR) == 0);
            for (char rest[4096]; recv(s, rest, sizeof rest, 0) > 0;) {}
            CHECK(close(s) == 0);
        }
    }
    // A thread that forbids it goes on.
    pthread_t thread;
    volatile int state = 0;
    CHECK(pthread_create(&thread, NULL, disabled, (void *)&state) == 0);
    while (state == 0) usleep(100);
    usleep(20000);
    CHECK(pthread_cancel(thread) == 0);
    usleep(20000);
    CHECK(state == 1);
    CHECK(send(fd, "world", 5, 0) == 5);
    void *result;
    CHECK(pthread_join(thread, &result) == 0);
    CHECK(result == PTHREAD_CANCELED && state == 2);
    exchange(fd);
    printf("cancelled\n");
}

static void *polls_pipe(void *argument) {
    struct epoll_event event = { .events = EPOLLIN };
    int epoll = epoll_create1(0), *pipe = argument;
    CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, pipe[0], &event) == 0);
    for (;;) epoll_wait(epoll, &event, 1, -1);
    return NULL;
}

static void exits(int signal) {
    (void)signal;
    pthread_exit(PTHREAD_CANCELED);
}

static void ends(void) {
    int ends[2];
    pthread_t thread;
    CHECK(pipe(ends) == 0);
    CHECK(pthread_create(&thread, NULL, polls_pipe, ends) == 0);
    usleep(20000);
    cancel(thread);
    // pthread_exit in a handler.
    fd = connected();
    exchange(fd);
    on(SIGUSR1, exits, 0);
    volatile int begun = 0;
    how_waits = 0;
    is_async = 0;
    CHECK(pthread_create(&thread, NULL, waits, (void *)&begun) == 0);
    while (!begun) usleep(100);
    usleep(20000);
    CHECK(pthread_kill(thread, SIGUSR1) == 0);
    void *result;
    CHECK(pthread_join(thread, &result) == 0);
    CHECK(result == PTHREAD_CANCELED && cleaned == 1);
    exchange(fd);
    printf("ended\n");
}

// --- what handlers are told, and what becomes of the calls ---

static void counts(int signal) {
    (void)signal;
    handled++;
}

static volatile int value, nested;

static void informed(int signal, siginfo_t *info, void *context) {
    CHECK(context != NULL && signal == SIGRTMIN + 1);
    CHECK(info->si_code == SI_QUEUE && info->si_pid == getpid());
    value = value * 10 + info->si_value.sival_int;
    sigset_t mask;
    CHECK(pthread_sigmask(SIG_SETMASK, NULL, &mask) == 0);
    CHECK(sigismember(&mask, SIGUSR2) == 1 && sigismember(&mask, SIGRTMIN + 1) == 1);
    CHECK(sigismember(&mask, SIGTERM) == 0);
    nested++;
}

// Waits until the first thread sleeps, at two looks in a row.
static void await_sleep(void) {
    char name[64], stat[512];
    snprintf(name, sizeof name, "/proc/self/task/%d/stat", getpid());
    for (int asleep = 0; asleep < 2;) {
        usleep(20000);
        int file = open(name, O_RDONLY | O_CLOEXEC);
        CHECK(file >= 0);
        ssize_t n = read(file, stat, sizeof stat - 1);
        CHECK(n > 0 && close(file) == 0);
        stat[n] = 0;
        char *state = strrchr(stat, ')');
        CHECK(state != NULL && state[1] == ' ');
        asleep = state[2] == 'S' ? asleep + 1 : 0;
    }
}

static void *sends_later(void *argument) {
    int before = handled;
    await_sleep();
    CHECK(pthread_kill(*(pthread_t *)argument, SIGUSR1) == 0);
    while (handled == before) usleep(1000);
    CHECK(send(fd, "y", 1, 0) == 1);
    return NULL;
}

static void handlers(void) {
    char byte;
    fd = connected();
    exchange(fd);
    pthread_t self = pthread_self(), other;
    on(SIGUSR1, counts, SA_RESTART);
    CHECK(pthread_create(&other, NULL, sends_later, &self) == 0);
    CHECK(recv(fd, &byte, 1, 0) == 1 && handled == 1);
    pthread_join(other, NULL);
    on(SIGUSR1, counts, 0);
    CHECK(pthread_create(&other, NULL, sends_later, &self) == 0);
    CHECK(recv(fd, &byte, 1, 0) == -1 && errno == EINTR && handled == 2);
    pthread_join(other, NULL);
    CHECK(recv(fd, &byte, 1, 0) == 1);
    on(SIGUSR1, counts, SA_RESTART);
    struct pollfd p = { .fd = fd, .events = POLLIN };
    CHECK(pthread_create(&other, NULL, sends_later, &self) == 0);
    CHECK(poll(&p, 1, -1) == -1 && errno == EINTR && handled == 3);
    pthread_join(other, NULL);
    CHECK(recv(fd, &byte, 1, 0) == 1);
    // A call with a mask of its own lets the signal in.
    sigset_t none, only;
    sigemptyset(&none);
    sigemptyset(&only);
    sigaddset(&only, SIGUSR1);
    CHECK(pthread_sigmask(SIG_BLOCK, &only, NULL) == 0);
    CHECK(pthread_create(&other, NULL, sends_later, &self) == 0);
    CHECK(ppoll(&p, 1, NULL, &none) == -1 && errno == EINTR && handled == 4);
    pthread_join(other, NULL);
    CHECK(recv(fd, &byte, 1, 0) == 1);
    sigset_t now;
    CHECK(pthread_sigmask(SIG_UNBLOCK, &only, &now) == 0 && sigismember(&now, SIGUSR1) == 1);
    // What a handler is told.
    struct sigaction action = { .sa_sigaction = informed, .sa_flags = SA_SIGINFO }, old;
    sigaddset(&action.sa_mask, SIGUSR2);
    CHECK(sigaction(SIGRTMIN + 1, &action, NULL) == 0);
    CHECK(sigaction(SIGRTMIN + 1, NULL, &old) == 0);
    CHECK(old.sa_sigaction == informed && (old.sa_flags & SA_SIGINFO));
    CHECK(sigismember(&old.sa_mask, SIGUSR2) == 1);
    sigaddset(&only, SIGRTMIN + 1);
    pthread_sigmask(SIG_BLOCK, &only, NULL);
    for (int i = 1; i <= 3; i++) sigqueue(getpid(), SIGRTMIN + 1, (union sigval){ .sival_int = i });
    pthread_sigmask(SIG_UNBLOCK, &only, NULL);
    CHECK(value == 123 && nested == 3);
    // A handler for one time.
    handled = 0;
    on(SIGUSR1, counts, SA_RESETHAND);
    CHECK(sigaction(SIGUSR1, NULL, &old) == 0 && (old.sa_flags & SA_RESETHAND));
    CHECK(raise(SIGUSR1) == 0 && handled == 1);
    CHECK(sigaction(SIGUSR1, NULL, &old) == 0 && old.sa_handler == SIG_DFL);
    CHECK(signal(SIGUSR1, counts) == SIG_DFL && signal(SIGUSR1, SIG_IGN) == counts);
    CHECK(signal(SIGUSR1, SIG_DFL) == SIG_IGN);
    CHECK(signal(SIGKILL, counts) == SIG_ERR && signal(0, counts) == SIG_ERR);
    printf("told\n");
}

static volatile int deepest, depth;

static void nests(int signal) {
    int error = errno;
    if (++depth > deepest) deepest = depth;
    send(fd, "n", 1, MSG_DONTWAIT);
    if (depth < 3) raise(signal);
    depth--;
    handled++;
    errno = error;
}

// A handler that does not block its own signal.
static void nesting(void) {
    fd = connected();
    exchange(fd);
    on(SIGALRM, nests, SA_NODEFER | SA_RESTART);
    struct itimerval each = { { 0, 1000 }, { 0, 1000 } };
    CHECK(setitimer(ITIMER_REAL, &each, NULL) == 0);
    static char in[4096];
    while (handled < 600) {
        CHECK(send(fd, "m", 1, 0) == 1);
        while (recv(fd, in, sizeof in, MSG_DONTWAIT) > 0) {}
        struct pollfd p = { .fd = fd, .events = POLLIN };
        CHECK(poll(&p, 1, 10) >= 0 || errno == EINTR);
    }
    each = (struct itimerval){ { 0, 0 }, { 0, 0 } };
    CHECK(setitimer(ITIMER_REAL, &each, NULL) == 0 && deepest >= 3);
    CHECK(shutdown(fd, SHUT_WR) == 0);
    while (recv(fd, in, sizeof in, 0) > 0) {}
    printf("nested\n");
}

static volatile int seen[12], come;

static void queued(int signal, siginfo_t *info, void *context) {
    (void)context;
    int value = info->si_value.sival_int;
    come++;
    if (value >= 0 && value < 12 && signal == SIGRTMIN + 2 + value % 3) seen[value]++;
}

static void *queues(void *argument) {
    usleep(50000);
    for (int i = 0; i < 12; i++) {
        union sigval value = { .sival_int = i };
        pthread_sigqueue(*(pthread_t *)argument, SIGRTMIN + 2 + i % 3, value);
    }
    usleep(50000);
    CHECK(send(fd, "y", 1, 0) == 1);
    return NULL;
}

// Each real-time signal comes once, with its own information.
static void queueing(void) {
    fd = connected();
    exchange(fd);
    struct sigaction action = { .sa_sigaction = queued, .sa_flags = SA_SIGINFO | SA_RESTART };
    for (int i = 2; i < 5; i++) sigaddset(&action.sa_mask, SIGRTMIN + i);
    for (int i = 2; i < 5; i++) CHECK(sigaction(SIGRTMIN + i, &action, NULL) == 0);
    pthread_t self = pthread_self(), other;
    for (int round = 0; round < 20; round++) {
        char byte;
        come = 0;
        CHECK(pthread_sigmask(SIG_BLOCK, &action.sa_mask, NULL) == 0);
        CHECK(pthread_create(&other, NULL, queues, &self) == 0);
        CHECK(pthread_sigmask(SIG_UNBLOCK, &action.sa_mask, NULL) == 0);
        CHECK(recv(fd, &byte, 1, 0) == 1);
        pthread_join(other, NULL);
        CHECK(come == 12);
        for (int i = 0; i < 12; i++) CHECK(seen[i] == round + 1);
    }
    printf("queued\n");
}

// A connect that a signal ends goes on in the kernel.
static void beginning(void) {
    on(SIGALRM, counts, 0);
    struct itimerval each = { { 0, 700 }, { 0, 700 } };
    CHECK(setitimer(ITIMER_REAL, &each, NULL) == 0);
    for (int i = 0; i < 100; i++) {
        struct sockaddr_in a = address();
        int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), error = 0;
        socklen_t len = sizeof error;
        if (connect(s, (void *)&a, sizeof a) < 0) {
            CHECK(errno == EINTR);
            struct pollfd p = { .fd = s, .events = POLLOUT };
            while (poll(&p, 1, -1) < 0) CHECK(errno == EINTR);
            CHECK(getsockopt(s, SOL_SOCKET, SO_ERROR, &error, &len) == 0 && error == 0);
        }
        exchange(s);
        close(s);
    }
    each = (struct itimerval){ { 0, 0 }, { 0, 0 } };
    CHECK(setitimer(ITIMER_REAL, &each, NULL) == 0);
    printf("100 connections\n");
}

static void leave_by_exit(int signal) {
    (void)signal;
    char rest[16];
    CHECK(send(fd, "bye", 3, 0) == 3 && shutdown(fd, SHUT_WR) == 0);
    while (recv(fd, rest, sizeof rest, 0) > 0) {}
    printf("left\n");
    fflush(stdout);
    _exit(0);
}

int main(int argc, char **argv) {
    CHECK(argc == 3 || argc == 4);
    port = atoi(argv[2]);
    const char *mode = argv[1];
    if (!strcmp(mode, "server")) server(atoi(argv[3]));
    else if (!strcmp(mode, "sends")) busy(send_one);
    else if (!strcmp(mode, "polls")) busy(poll_it);
    else if (!strcmp(mode, "peeks")) busy(peek_it);
    else if (!strcmp(mode, "forks")) busy(fork_it);
    else if (!strcmp(mode, "connects")) connections();
    else if (!strcmp(mode, "jumps")) jumping();
    else if (!strcmp(mode, "cancels")) cancelling();
    else if (!strcmp(mode, "ends")) ends();
    else if (!strcmp(mode, "handlers")) handlers();
    else if (!strcmp(mode, "nests")) nesting();
    else if (!strcmp(mode, "queues")) queueing();
    else if (!strcmp(mode, "begins")) beginning();
    else if (!strcmp(mode, "leaves")) {
        fd = connected();
        exchange(fd);
        on(SIGALRM, leave_by_exit, 0);
        alarm(1);
        wait_by(0);
    } else CHECK(!"a mode");
    return 0;
}
