// A web server of several processes. The first one accepts, and passes connections to the others.
const cluster = require('cluster');
const fs = require('fs');
const http = require('http');

const [address, port] = process.argv.slice(2);

if (cluster.isPrimary) {
    for (let n = 0; n < 3; n++) cluster.fork();
    process.on('SIGTERM', () => {
        for (const worker of Object.values(cluster.workers)) worker.process.kill();
        process.exit();
    });
} else {
    const crypto = require('crypto');
    const small = 'x'.repeat(612);
    http.createServer((request, answer) => {
        if (request.url === '/large') {
            fs.createReadStream('large').pipe(answer);
        } else if (request.url === '/hash') {
            const hash = crypto.createHash('sha256');
            request.on('data', (bytes) => hash.update(bytes));
            request.on('end', () => answer.end(hash.digest('hex')));
        } else {
            answer.end(small);
        }
    }).listen(Number(port), address);
}
