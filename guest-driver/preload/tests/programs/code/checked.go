// An echo server, and a client that checks each byte, while the runtime of Go is busy: garbage is
// collected all the time, a goroutine must be preempted, and children are executed.
package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

func check(err error) {
	if err != nil {
		panic(err)
	}
}

var spins int64

// A loop without calls: only a signal stops it.
func spin() {
	for {
		for n := int64(0); n < 1<<22; n++ {
			spins += n & 1
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func children(count *int64) {
	for n := 0; ; n++ {
		word := fmt.Sprint("child ", n)
		out, err := exec.Command("/bin/echo", word).Output()
		check(err)
		if string(out) != word+"\n" {
			panic("wrong word of a child: " + string(out))
		}
		atomic.AddInt64(count, 1)
		time.Sleep(20 * time.Millisecond)
	}
}

func echo(connection net.Conn) {
	defer connection.Close()
	head := make([]byte, 4)
	for {
		if _, err := io.ReadFull(connection, head); err == io.EOF {
			return
		} else {
			check(err)
		}
		body := make([]byte, binary.BigEndian.Uint32(head))
		_, err := io.ReadFull(connection, body)
		check(err)
		_, err = connection.Write(body)
		check(err)
	}
}

func ask(address string, number, requests int) {
	connection, err := net.Dial("tcp", address)
	check(err)
	random := rand.New(rand.NewSource(int64(number)))
	for n := 0; n < requests; n++ {
		size := 1 + random.Intn(200)
		if n%100 == 0 {
			size = 100_000
		}
		sent := make([]byte, 4+size)
		binary.BigEndian.PutUint32(sent, uint32(size))
		random.Read(sent[4:])
		_, err = connection.Write(sent)
		check(err)
		check(connection.SetReadDeadline(time.Now().Add(60 * time.Second)))
		got := make([]byte, size)
		_, err = io.ReadFull(connection, got)
		check(err)
		if !bytes.Equal(got, sent[4:]) {
			panic("other bytes came back")
		}
	}
	check(connection.Close())
}

// Executes itself for the rest of the arguments.
func start() {
	child := exec.Command(os.Args[0], os.Args[2:]...)
	child.Stdout, child.Stderr = os.Stdout, os.Stderr
	check(child.Run())
}

func main() {
	if os.Args[1] == "start" {
		start()
		return
	}
	debug.SetGCPercent(1)
	// SIGPROF, a thousand times in a second of work. The runtime keeps what the profile has room for.
	runtime.SetCPUProfileRate(1000)
	var count int64
	go spin()
	go children(&count)
	// More signals than those of the runtime.
	signals := make(chan os.Signal, 100)
	signal.Notify(signals, syscall.SIGUSR1)
	go func() {
		for {
			check(syscall.Kill(os.Getpid(), syscall.SIGUSR1))
			<-signals
			time.Sleep(time.Millisecond)
		}
	}()
	if os.Args[1] == "serve" {
		listener, err := net.Listen("tcp", os.Args[2])
		check(err)
		for {
			connection, err := listener.Accept()
			check(err)
			go echo(connection)
		}
	}
	connections, requests := 0, 0
	fmt.Sscan(os.Args[3], &connections)
	fmt.Sscan(os.Args[4], &requests)
	begun := time.Now()
	var wait sync.WaitGroup
	for n := 0; n < connections; n++ {
		wait.Add(1)
		go func(n int) {
			defer wait.Done()
			ask(os.Args[2], n, requests/connections)
		}(n)
	}
	wait.Wait()
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	if atomic.LoadInt64(&count) == 0 || memory.NumGC < 3 {
		panic(fmt.Sprint("too quiet: children ", count, ", collections ", memory.NumGC))
	}
	fmt.Println("per second:", float64(requests)/time.Since(begun).Seconds())
}
